"""Captured steps give the losses and gradients of the network, whatever stands behind a batch; here without a device's
graphs, which replay the same program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.families.materials import step_capture
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.layout import MaterialsStage
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.step_capture import BatchSizes, StepCapture, empty_batch, rows_of, sizes_of
from phalanx.families.registry import bind
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.initial_values import initialise_parameters
from phalanx.layout.layout_model import BuildContext, LayoutModel
from phalanx.layout.mesh import Axis
from phalanx.nn.splits import ModelChunk
from phalanx.torch_compat.compiler import SizedProgram
from phalanx.verification.family import VerifiableModel

BODIES = ("gin", "sage", "mfc", "pna", "pna+", "pnaeq", "gatv2", "cgcnn", "schnet", "egnn", "painn", "nequip", "mace")


def run_of(
    body: str, layout: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **model: Any
) -> MaterialsRun:
    heads: dict[str, Any] = {
        "energy": {"force_weight": 10.0, "stress_weight": 3.0},
        "charges": {},
        "properties": {"names": ["gap", "moment"]},
        "branches": [{"name": "first", "reference_energies": {"1": -1.0}}, {"name": "second", "energy_scale": 2.0}],
    }
    size = {"n_layers": 2, "d_model": 8, "n_radial": 4, "cutoff": 3.0, "max_atomic_number": 6, "mean_neighbors": 12.0}
    narrow = {"mace": {"degree": 2, "hidden_degree": 1, "correlation": 2, "radial_width": 8}} if body == "mace" else {}
    return MaterialsRun.model_validate(
        {
            "model": {"family": "materials", "body": body, **size, **narrow, **heads, **model},
            "data": {"sources": [{"name": "any", "path": "nowhere"}], "prepared": "nowhere", "cutoff": 3.0},
            "layout": {"global_batch": 4, "microbatch": 1, "precision": "fp64", **(layout or {})},
            "optimizer": {"lr": 0.01},
            "training": {"steps": 2, **(training or {})},
        }
    )


def network(run: MaterialsRun) -> MaterialsNetwork:
    found = MaterialsNetwork(run.model, dtype=torch.float64).double()
    initialise_parameters(dict(found.named_parameters()), bind(run).initial_rules(), 0, {})
    return found


def inputs_of(run: MaterialsRun, step: int, structures: int) -> dict[str, Any]:
    species_N, inputs = bind(run, VerifiableModel).samples(step, 0, structures, structures).inputs()
    del inputs["max_atoms"]
    return {"species_N": species_N, **inputs}


def gradients(net: MaterialsNetwork, losses: Tensor, scale: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad((losses * scale).sum(), list(net.parameters()), allow_unused=True))


def compare(net: MaterialsNetwork, capture: StepCapture, inputs: dict[str, Any], scale: Tensor) -> None:
    """Equal to rounding; a bias that shifts all charges of a molecule has no gradient but rounding."""
    wanted = net(**inputs)
    found = capture.losses(inputs, list(net.parameters()), scale)
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-12)
    pairs = zip(gradients(net, found, scale), gradients(net, wanted, scale), strict=True)
    for (name, parameter), (ours, theirs) in zip(net.named_parameters(), pairs, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None and theirs is not None:
            assert ours.shape == parameter.shape
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("body", BODIES)
def test_losses_and_gradients_are_those_of_the_network(body: str) -> None:
    run = run_of(body)
    net = network(run)
    capture = StepCapture(lambda: network(run), source=0, cutoff=run.model.cutoff, compiled=False)
    for step, structures in ((1, 12), (2, 12), (3, 7), (4, 16)):
        scale = torch.linspace(0.5, 1.5, 5, dtype=torch.float64) / step
        compare(net, capture, inputs_of(run, step, structures), scale)
        # Another step, other parameters: a captured step reads those it is given.
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1.1)


def test_gradients_of_pna_do_not_hang_on_rounding() -> None:
    """Compiled, numbers round otherwise: where two neighbours tie, a largest message would be another one's then."""
    run = run_of("pna", energy={"force_weight": 10.0}, charges=None, properties=None, branches=[{}], n_layers=1)
    wide, single, scale = network(run), network(run).float(), torch.ones(2, dtype=torch.float64)
    single.dtype = torch.float32
    inputs = inputs_of(run, 1, 12)
    exact = gradients(wide, wide(**inputs), scale)
    inputs |= {name: inputs[name].float() for name in ("positions_N3", "shifts_E3", "cells_G33")}
    for ours, theirs in zip(gradients(single, single(**inputs), scale), exact, strict=True):
        assert ours is not None and theirs is not None
        assert (ours.double() - theirs).norm() < 1e-4 * theirs.norm() + 1e-6


def test_gradients_are_added_up_where_nothing_follows_them() -> None:
    run = run_of("painn")
    net = network(run)
    capture = StepCapture(lambda: network(run), source=0, cutoff=run.model.cutoff, compiled=False)
    scale = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    parts = [inputs_of(run, step, 12) for step in (1, 2)]
    for inputs in parts:
        losses = capture.add_gradients(inputs, list(net.parameters()), scale)
        assert not losses.requires_grad
    found = [parameter.grad for parameter in net.parameters()]
    first, second = (gradients(net, net(**inputs), scale) for inputs in parts)
    for ours, one, other in zip(found, first, second, strict=True):
        assert (ours is None) == (one is None)
        if ours is not None and one is not None and other is not None:
            torch.testing.assert_close(ours, one + other, rtol=1e-10, atol=1e-11)


def test_frozen_parameters_get_no_gradient_and_the_others_theirs() -> None:
    run = run_of("painn")
    free, net = network(run), network(run)
    frozen = {name for name, _ in net.named_parameters() if name.startswith(("embedding.", "blocks.0."))}

    def freeze(made: MaterialsNetwork) -> MaterialsNetwork:
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in frozen)
        return made

    freeze(net).load_state_dict(free.state_dict())
    capture = StepCapture(lambda: freeze(network(run)), source=0, cutoff=run.model.cutoff, compiled=False)
    scale, inputs = torch.linspace(0.5, 1.5, 5, dtype=torch.float64), inputs_of(run, 1, 12)
    capture.add_gradients(inputs, list(net.parameters()), scale)
    expected = gradients(free, free(**inputs), scale)
    for (name, parameter), wanted in zip(net.named_parameters(), expected, strict=True):
        assert (parameter.grad is None) == (name in frozen or wanted is None), name
        if parameter.grad is not None and wanted is not None:
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-10, atol=1e-11)


def test_atoms_that_stand_for_none_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features grow as the square in each block of PaiNN; with many neighbours they would leave float32."""
    monkeypatch.setattr(step_capture, "_LEAST_USED", 0.0)
    run = run_of("painn", n_layers=6, mean_neighbors=2.0)

    def single() -> MaterialsNetwork:
        found = network(run).float()
        found.dtype = torch.float32
        return found

    def narrowed(inputs: dict[str, Any]) -> dict[str, Any]:
        wide = ("energy_G", "properties_GP")
        return {k: v.float() if v.dtype == torch.float64 and k not in wide else v for k, v in inputs.items()}

    net, scale = single(), torch.ones(5, dtype=torch.float64)
    capture = StepCapture(single, source=0, cutoff=run.model.cutoff, compiled=False)
    capture.losses(narrowed(inputs_of(run, 1, 32)), list(net.parameters()), scale)
    few = narrowed(inputs_of(run, 1, 3))
    few["edges_2E"], few["shifts_E3"] = few["edges_2E"][:, :12], few["shifts_E3"][:12]
    found = gradients(net, capture.losses(few, list(net.parameters()), scale), scale)
    assert len(capture._captured) == 1
    for ours, theirs in zip(found, gradients(net, net(**few), scale), strict=True):
        assert ours is not None and theirs is not None and theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=float(theirs.abs().max()) * 1e-5 + 1e-5)


def test_a_few_captured_steps_serve_batches_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_capture, "_MOST", 3)
    run = run_of("gin")
    net = network(run)
    capture = StepCapture(lambda: network(run), source=0, cutoff=run.model.cutoff, compiled=False)
    scale = torch.ones(5, dtype=torch.float64)
    rooms = []
    for structures in (4, 12, 24, 40, 4, 40):
        compare(net, capture, inputs_of(run, 1, structures), scale)
        rooms.append([one.room.edges for one in capture._captured])
    assert [len(found) for found in rooms] == [1, 2, 3, 3, 3, 3]
    # The largest gave way to one that is larger still, and was not needed again.
    assert max(rooms[3]) > max(rooms[2]) and rooms[3:] == [rooms[3]] * 3


def test_a_number_scales_all_tasks_alike() -> None:
    run = run_of("schnet")
    net = network(run)
    capture = StepCapture(lambda: network(run), source=0, cutoff=run.model.cutoff, compiled=False)
    inputs = inputs_of(run, 1, 8)
    losses = capture.losses(inputs, list(net.parameters()), 0.25)
    found = gradients(net, losses, torch.tensor(0.25))
    wanted = gradients(net, net(**inputs), torch.tensor(0.25))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("body", ["painn", "mace"])
def test_one_program_serves_batches_of_all_sizes(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that the compiler is given; tests/torch_compat/test_compat_program.py compiles one."""
    monkeypatch.setattr(SizedProgram, "compile", lambda program, dtype: program)
    run = run_of(body)
    net = network(run)
    capture = StepCapture(lambda: network(run), source=0, cutoff=run.model.cutoff, compiled=True)
    scale = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    programs = []
    for step, structures in ((1, 12), (2, 24), (3, 5)):
        compare(net, capture, inputs_of(run, step, structures), scale)
        assert capture._program is not None
        programs.append(capture._program._function)
    assert len(capture._captured) == 3
    assert programs == [programs[0]] * 3
    assert isinstance(programs[0], SizedProgram)
    # It is lowered as it is, which is the quick way: nothing in it changes a tensor in place.
    targets = [node.target for node in programs[0].graph.graph.nodes]
    assert not any(one._schema.is_mutable for one in targets if isinstance(one, torch._ops.OpOverload))
    # A copy from host memory would wait for the device, which a capture cannot.
    assert not any("lift_fresh" in str(node.target) for node in programs[0].graph.graph.nodes)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_compiler_is_loaded_while_what_goes_before_a_step_runs(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(step_capture, "begin_loading", lambda: begun.append("compiler"))
    StepCapture(lambda: network(run_of("mace")), source=0, cutoff=5.0, compiled=compiled)
    assert begun == ["compiler"] * compiled


WHEN = {
    "accelerator": (run_of("painn"), "cuda", 1, False, True),
    "cpu": (run_of("painn"), "cpu", 1, False, False),
    "cpu, asked for": (run_of("painn", training={"compile": True}), "cpu", 1, False, True),
    "not wanted": (run_of("painn", training={"compile": False}), "cuda", 1, False, False),
    "deterministic": (run_of("painn", training={"deterministic": True}), "cuda", 1, False, False),
    "pairs of edges": (run_of("dimenet++"), "cuda", 1, False, False),
    "global attention": (run_of("painn", attention={"heads": 2}), "cuda", 1, False, False),
    "recompute": (run_of("painn", layout={"recompute": "full"}), "cuda", 1, False, False),
    "atoms over ranks": (run_of("painn"), "cuda", 2, False, False),
    "sharded, one unit": (run_of("painn"), "cuda", 1, True, True),
    "sharded by block": (run_of("painn", energy=None), "cuda", 1, True, False),
}


@pytest.mark.parametrize("name", WHEN)
def test_steps_are_captured_where_they_can_be(name: str) -> None:
    run, device, cp, gathered, wanted = WHEN[name]
    share = SequenceShare(Axis("cp", 0, cp), Axis("tp"), "ring")
    choice = AttentionChoice("sdpa")
    building = BuildContext(torch.device(device), choice, share, gathered=gathered)
    stage, _ = bind(run, LayoutModel).build_stage(building, ModelChunk(range(run.model.n_layers)), 0)
    assert isinstance(stage, MaterialsStage)
    assert (stage.capture is not None) == wanted
    # A program needs all parameters at once.
    assert stage.one_unit == (wanted or run.model.energy is not None)


CUTOFF = 5.0


def tensors(graphs: int, atoms: int, edges: int) -> dict[str, Tensor]:
    """A batch of two sources with some labels; numbers that tell rows apart."""
    return {
        "species_N": torch.arange(atoms) % 9 + 1,
        "positions_N3": torch.randn(atoms, 3),
        "graph_N": torch.arange(atoms) * graphs // atoms,
        "edges_2E": torch.randint(atoms, (2, edges)),
        "shifts_E3": torch.zeros(edges, 3),
        "cells_G33": torch.ones(graphs, 3, 3),
        "source_G": torch.arange(graphs) % 2,
        "energy_G": torch.randn(graphs, dtype=torch.float64),
        "forces_N3": torch.randn(atoms, 3),
        "properties_GP": torch.randn(graphs, 2, dtype=torch.float64),
    }


def test_room_is_made_for_what_stands_behind() -> None:
    sizes = BatchSizes(4, 70, 900)
    room = sizes.room(0.1)
    assert room.holds(sizes) and room.holds(BatchSizes(4, 77, 990))
    assert not room.holds(BatchSizes(4, 70, room.edges + 1))
    assert not room.holds(BatchSizes(room.graphs, 70, 900)), "one structure must be left for what stands behind"
    assert not room.holds(BatchSizes(4, room.atoms, 900)), "and some atoms"
    assert not room.holds(BatchSizes(4, room.atoms - 7, 900))


@pytest.mark.parametrize("edges", [0, 900, 5000])
def test_what_stands_behind_is_one_more_structure_without_labels(edges: int) -> None:
    batch = tensors(4, 70, edges)
    sizes = sizes_of(batch)
    assert sizes == BatchSizes(4, 70, edges)
    room = sizes.room(0.2)
    padded = empty_batch(batch, room, source=1, cutoff=CUTOFF)
    assert sizes_of(padded) == room
    for name, value in batch.items():
        for to, of in zip(
            rows_of(name, padded[name], sizes, behind=False), rows_of(name, value, sizes, behind=False), strict=True
        ):
            to.copy_(of)
    for name, value in batch.items():
        ours = padded[name][:, :edges] if name == "edges_2E" else padded[name][: len(value)]
        assert padded[name].dtype == value.dtype and ours.equal(value)
    assert (padded["graph_N"].diff() >= 0).all() and (padded["graph_N"][70:] == room.graphs - 1).all()
    assert (padded["source_G"][4:] == 1).all()
    for label in ("energy_G", "forces_N3", "properties_GP"):
        assert padded[label][len(batch[label]) :].isnan().all()
    behind_2E = padded["edges_2E"][:, edges:]
    assert behind_2E[0].equal(behind_2E[1]) and (behind_2E[1].diff() >= 0).all()
    assert (behind_2E >= 70).all() and (behind_2E < room.atoms).all()
    assert (padded["shifts_E3"][edges:].norm(dim=1) > CUTOFF).all()
    # No atom gets so many that sums into it take long.
    assert behind_2E.shape[1] == 0 or behind_2E[0].bincount().max() <= 1024


def test_rows_behind_are_those_that_the_batch_leaves() -> None:
    sizes, room = BatchSizes(2, 10, 30), BatchSizes(4, 24, 48)
    padded = empty_batch(tensors(2, 10, 30), room, source=0, cutoff=CUTOFF)
    assert [len(part) for part in rows_of("edges_2E", padded["edges_2E"], sizes, behind=True)] == [18, 18]
    assert [len(part) for part in rows_of("forces_N3", padded["forces_N3"], sizes, behind=True)] == [14]
    assert rows_of("energy_G", padded["energy_G"], room, behind=True) == []
    assert all(part.is_contiguous() for part in rows_of("edges_2E", padded["edges_2E"], sizes, behind=True))


def test_there_is_room_for_edges_where_the_first_batch_has_none() -> None:
    """A size of 0 could not be told from one that never changes."""
    assert BatchSizes(2, 3, 0).room(0.1).edges >= 16
