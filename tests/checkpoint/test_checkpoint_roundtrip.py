"""What is saved comes back, to the bit: tensors of every dtype and layout, state, optimizer, generators."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.checkpoint import (
    CheckpointStore,
    collect_tensors,
    materialise_optimizer_state,
    read_state,
    read_tensors,
    rng_state,
    saver,
    set_rng_state,
    shard_plan,
)
from phalanx.errors import CheckpointError
from saved_states import assert_same_bits, bits, every_dtype, small_state, trained_model, zeros_like


@pytest.fixture
def store(tmp_path: Path):
    with CheckpointStore(tmp_path / "checkpoints", keep_last=3) as store:
        yield store


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_dtype_comes_back_to_the_bit(store, asynchronous):
    tensors = every_dtype()
    store.save(7, tensors, {}, asynchronous=asynchronous)
    loaded = zeros_like(tensors)
    store.load(store.newest(), loaded)
    assert_same_bits(loaded, tensors)
    assert_same_bits(read_tensors(store.newest().path), tensors)


def test_scalars_empty_strided_and_overlapping_tensors(store):
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "transposed": base.T,
        "every_other": base[:, ::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "same_memory": base,
        "parameter": nn.Parameter(torch.ones(2)),
    }
    store.save(1, tensors, {})
    loaded = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    store.load(store.newest(), loaded)
    assert_same_bits(loaded, tensors)


def test_loads_into_strided_tensors_and_parameters(store):
    weight = torch.arange(12.0).view(3, 4)
    store.save(1, {"weight": weight}, {})
    for target in (torch.zeros(4, 3).T, nn.Parameter(torch.zeros(3, 4))):
        store.load(store.newest(), {"weight": target})
        assert torch.equal(target.detach(), weight)


def test_large_shards_are_cut_into_pieces_and_files(store, monkeypatch):
    monkeypatch.setattr(shard_plan, "MAX_CHUNK_BYTES", 1000)
    monkeypatch.setattr(saver, "MAX_FILE_BYTES", 4096)
    tensors = small_state(0) | {"one_row": torch.randn(1, 7, 90), "vector": torch.randn(777)}
    store.save(3, tensors, {})
    path = store.newest().path
    manifest = json.loads((path / "manifest.json").read_text())
    assert len(manifest["files"]) > 50
    # A row longer than the limit stays whole, so one row of float32 is what a chunk holds at least.
    sizes = [np.prod(chunk["sizes"]) * 4 for tensor in manifest["tensors"] for chunk in tensor["chunks"]]
    assert max(sizes) == 256 * 4 and len(sizes) > 400
    assert_same_bits(read_tensors(path), tensors)


def test_data_files_are_plain_safetensors_and_nothing_is_pickled(store):
    from_library = pytest.importorskip("safetensors.torch").load_file
    tensors = small_state(0)
    store.save(3, tensors, {"a": 1})
    path = store.newest().path
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "rank-00000-000.safetensors", "state.json"]
    assert_same_bits(from_library(path / "rank-00000-000.safetensors"), tensors)
    assert (path / "rank-00000-000.safetensors").stat().st_mode & 0o777 == (path / "state.json").stat().st_mode & 0o777


def test_state_comes_back_as_it_went_in(store):
    state = {
        "step": 12,
        "seed": 2**200,
        "lr": 0.1 + 0.2,
        "tiny": 5e-324,
        "text": "naïve \u2028 \x00 \U0001f600",
        "nested": {"list": [None, True, [], {}]},
    }
    store.save(12, {"x": torch.ones(1)}, state)
    assert store.load(store.newest(), {"x": torch.ones(1)}) == state == read_state(store.newest().path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"schedule": {"lr": torch.ones(1)}}, "state.schedule.lr is a Tensor"),
        ({"betas": (0.9, 0.95)}, "state.betas is a tuple"),
        ({"scale": np.float32(1)}, "state.scale is a float32"),
        ({"losses": [1.0, float("nan")]}, "state.losses[1]=nan is not a finite number"),
        ({"by_step": {3: 1}}, "state.by_step: key 3 is a int; JSON keys are strings"),
        ([1], "state is a list; a dict is expected"),
    ],
)
def test_state_that_json_would_change_is_refused(store, state, message):
    with pytest.raises(CheckpointError) as refusal:
        store.save(1, {"x": torch.ones(1)}, state)
    assert message in str(refusal.value)
    assert store.list() == [] and not store.root.exists()


def test_state_that_contains_itself_is_refused(store):
    state: dict = {}
    state["again"] = state
    with pytest.raises(CheckpointError, match="nested more than 64 deep, or contains itself"):
        store.save(1, {"x": torch.ones(1)}, state)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.ones(2, dtype=torch.complex128)}, "tensor 'a' cannot be saved: dtype torch.complex128"),
        ({"a": torch.eye(2).to_sparse()}, "its layout is torch.sparse_coo"),
        ({"a": torch.ones(2, device="meta")}, "it is on the meta device"),
        ({"a": [1.0]}, "it is a list; put what is not a tensor into the state"),
        ({"a@b": torch.ones(2)}, "a tensor's name is 1 to 1024 printable characters without '@'"),
        ({"a\nb": torch.ones(2)}, "a tensor's name is 1 to 1024 printable characters without '@'"),
    ],
)
def test_tensors_that_cannot_be_saved_are_refused(store, tensors, message):
    with pytest.raises(CheckpointError) as refusal:
        store.save(1, tensors, {})
    assert message in str(refusal.value)


def test_tensors_that_do_not_fit_are_named_in_one_error(store):
    store.save(5, {"model.a": torch.ones(2, 3), "model.b": torch.ones(4), "model.c": torch.ones(1)}, {})
    wanted = {
        "model.a": torch.ones(3, 2),
        "model.b": torch.ones(4, dtype=torch.bfloat16),
        **{f"model.new{index}": torch.ones(1) for index in range(5)},
    }
    with pytest.raises(CheckpointError) as refusal:
        store.load(store.newest(), wanted)
    assert str(refusal.value) == (
        f"{store.root}/step-00000005 does not fit this model: 5 missing from the checkpoint: model.new0, model.new1, "
        "model.new2, ...; 1 in the checkpoint but not in this model: model.c; 2 of another dtype or shape: "
        "model.a (saved float32[2, 3], wanted float32[3, 2]), model.b (saved float32[4], wanted bfloat16[4]). "
        "Use the run file it was saved with"
    )
    assert torch.equal(wanted["model.a"], torch.ones(3, 2))


def test_prefix_loads_the_model_alone(store):
    model, optimizer = trained_model()
    store.save(2, collect_tensors(model, optimizer), {})
    weights = zeros_like(collect_tensors(model))
    store.load(store.newest(), weights, prefix="model.")
    assert_same_bits(weights, collect_tensors(model))
    assert_same_bits(read_tensors(store.newest().path, "model."), collect_tensors(model))
    with pytest.raises(CheckpointError, match=r"in the checkpoint but not in this model: optimizer\."):
        store.load(store.newest(), weights)
    with pytest.raises(CheckpointError, match="holds no tensor whose name starts with 'modle'"):
        read_tensors(store.newest().path, "modle")


def test_names_depend_on_the_model_alone():
    model, optimizer = trained_model()
    names = list(collect_tensors(model, optimizer))
    assert names == [
        "model.embedding.weight",
        "model.norm.weight",
        "model.norm.bias",
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
        *(
            f"optimizer.{parameter}.{what}"
            for parameter in ("embedding.weight", "norm.weight", "norm.bias")
            for what in ("step", "exp_avg", "exp_avg_sq")
        ),
    ]
    groups = [{"params": [parameter]} for parameter in reversed(list(model.parameters()))]
    regrouped = torch.optim.AdamW(groups, lr=0.5)
    materialise_optimizer_state(regrouped)
    assert set(collect_tensors(model, regrouped)) == set(names)
    wrapped = nn.ModuleDict({name: torch.compile(part, backend="eager") for name, part in model.items()})
    assert set(collect_tensors(wrapped)) == {name for name in names if name.startswith("model.")}


def test_optimizer_goes_on_as_if_nothing_had_happened(store):
    model, optimizer = trained_model(seed=0)
    store.save(2, collect_tensors(model, optimizer), {})
    other_model, _ = trained_model(seed=1)
    fresh = torch.optim.AdamW(reversed(list(other_model.parameters())), lr=0.25, betas=(0.5, 0.6), fused=True)
    materialise_optimizer_state(fresh)
    store.load(store.newest(), collect_tensors(other_model, fresh))
    assert_same_bits(collect_tensors(other_model, fresh), collect_tensors(model, optimizer))
    # Hyper-parameters are the run file's, whatever the saved run used.
    assert fresh.param_groups[0]["lr"] == 0.25 and fresh.param_groups[0]["betas"] == (0.5, 0.6)
    fresh.param_groups[0].update(lr=0.01, betas=(0.9, 0.999))
    for each_model, each in ((model, optimizer), (other_model, fresh)):
        for parameter in each_model.parameters():
            parameter.grad = torch.full_like(parameter, 0.3)
        each.step()
    assert_same_bits(collect_tensors(other_model, fresh), collect_tensors(model, optimizer))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}, {"capturable": False}])
def test_materialising_changes_nothing_else(options):
    parameters = [nn.Parameter(torch.tensor([-0.0, 1.5, float("inf")])), nn.Parameter(torch.ones(2))]
    parameters[0].grad = torch.full((3,), 7.0)
    before = [bits(parameter).clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.1) if "capturable" in options else 0.1, **options)
    materialise_optimizer_state(optimizer)
    assert all(torch.equal(bits(parameter), old) for parameter, old in zip(parameters, before, strict=True))
    assert torch.equal(parameters[0].grad, torch.full((3,), 7.0)) and parameters[1].grad is None
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())
    # A first step after it is the first step of an optimizer without it.
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    plain = torch.optim.AdamW(twins, lr=0.1, **options)
    for group in (parameters, twins):
        for parameter in group:
            parameter.grad = torch.linspace(-1, 1, parameter.numel())
    optimizer.step()
    plain.step()
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(parameters, twins, strict=True))


def test_materialising_leaves_existing_state_alone():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([used, unused])
    used.grad = torch.ones(2)
    optimizer.step()
    moment = optimizer.state[used]["exp_avg"].clone()
    materialise_optimizer_state(optimizer)
    assert torch.equal(optimizer.state[used]["exp_avg"], moment) and float(optimizer.state[used]["step"]) == 1
    assert not optimizer.state[unused]["exp_avg"].any() and float(optimizer.state[unused]["step"]) == 0


def test_strange_optimizer_state_is_refused():
    model = nn.Linear(2, 2)
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(CheckpointError, match=r"shape \[3\] in optimizer group 0 is not one of the model's"):
        collect_tensors(model, stranger)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight]["note"] = "text"
    with pytest.raises(CheckpointError, match=r"optimizer\.weight\.note is a str, not a tensor"):
        collect_tensors(model, optimizer)


def test_generators_go_on_where_they_were(store):
    def draw():
        return [
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            np.random.rand(),
            float(torch.rand(())),
        ]

    # An odd number of Gaussians leaves half a pair behind in Python's and NumPy's generator.
    draw()
    store.save(1, {"x": torch.ones(1)}, {"rng": rng_state()})
    expected = [draw() for _ in range(3)]
    draw()
    set_rng_state(store.load(store.newest(), {"x": torch.ones(1)})["rng"])
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("broken", [{}, {"torch": "zz"}, {"torch": "00"}, {"python": {"version": 3}}, {"numpy": None}])
def test_a_strange_generator_state_is_refused(broken):
    before = rng_state()
    with pytest.raises(CheckpointError, match=r"state\.rng is not a state of random number generators"):
        set_rng_state(before | broken if broken else {})
