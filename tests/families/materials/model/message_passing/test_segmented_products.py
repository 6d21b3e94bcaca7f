"""Messages and contractions of MACE by cuEquivariance are ours: the same terms, the same derivatives."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atom_graphs import batch_of, random_structure
from phalanx.families.materials.model.message_passing import equivariant_constants as constants
from phalanx.families.materials.model.message_passing import mace, segmented_products
from phalanx.families.materials.model.message_passing.segmented_products import Term
from phalanx.families.materials.model_config import EnergyHead
from small_networks import filled_network, small_model

OPTIONS = {"degree": 2, "hidden_degree": 1, "correlation": 3}


def add_terms(terms: tuple[Term, ...], components: int, *inputs: Tensor) -> Tensor:
    """Return the sum of all terms, one after another: [N, components, C]."""
    sums = inputs[0].new_zeros(inputs[0].shape[0], components, inputs[0].shape[2])
    for (*factors, component), value in terms:
        places = range(len(factors)) if len(inputs) == len(factors) else [0] + [1] * (len(factors) - 1)
        term = torch.full_like(sums[:, 0], value)
        for place, factor in zip(places, factors, strict=True):
            term = term * inputs[place][:, factor]
        sums[:, component] += term
    return sums


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("inside", [0, 1])
def test_terms_of_messages_are_those_that_are_coupled(inside: int) -> None:
    paths, components = (
        tuple(constants.coupling_paths(inside, 2, 2)),
        constants.count_components(inside),
    )
    couplings, path_of = constants.stack_couplings(paths, components, 9)
    weights, features, harmonics = numbers(5, len(paths), 3), numbers(5, components, 3), numbers(5, 9)
    coupled = (harmonics @ couplings.on(features.device, features.dtype)).unflatten(1, (-1, components))
    wanted = torch.bmm(coupled, features) * weights[:, path_of.values]
    terms = constants.coupling_terms(paths, components, 9)
    found = add_terms(terms, path_of.values.size, weights, features, harmonics[:, :, None].expand(-1, -1, 3))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outside", [0, 1])
def test_terms_of_contractions_are_those_that_are_formed(outside: int) -> None:
    config = small_model("mace", d_model=3).model_copy(
        update={"mace": small_model("mace").mace.model_copy(update=OPTIONS)}
    )
    contraction = mace.SymmetricContraction(config, outside).double()
    for table in contraction.weights:
        torch.nn.init.normal_(table.weight)
    species, features = torch.tensor([1, 6, 8, 1]), numbers(4, 9, 3)
    weights = torch.cat([table(species, torch.float64) for table in contraction.weights], dim=1)
    found = add_terms(
        constants.contraction_terms(*contraction.sizes), constants.count_components(outside), weights, features
    )
    torch.testing.assert_close(found, contraction(features, species), rtol=1e-12, atol=1e-12)


def test_nothing_changes_where_there_are_no_kernels() -> None:
    assert not segmented_products.has_kernels(numbers(2, 3, 32))


@pytest.mark.parametrize(
    ("device", "dtype", "width", "installed", "words"),
    [
        ("cpu", torch.float32, 32, True, "for NVIDIA devices"),
        ("cuda", torch.bfloat16, 32, True, "no kernels for bfloat16"),
        ("cuda", torch.float32, 40, True, "a width that 32 divides, not 40"),
        ("cuda", torch.float32, 32, False, "not both installed"),
        ("cuda", torch.float64, 64, True, ""),
    ],
)
def test_reasons_name_what_there_are_no_kernels_for(
    device: str, dtype: torch.dtype, width: int, installed: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segmented_products, "is_rocm", lambda: False)
    monkeypatch.setattr(segmented_products, "_kernels_are_there", lambda: installed)
    reason = segmented_products.why_no_kernels(torch.device(device), dtype, width)
    assert words in reason and bool(reason) == bool(words)


def test_compiled_kernels_are_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVRTC_CACHE_DIR", "PARALLEL_COMPILE"):
        # So that what is set is taken back.
        monkeypatch.setenv(f"CUEQUIVARIANCE_OPS_{name}", "")
        monkeypatch.delenv(f"CUEQUIVARIANCE_OPS_{name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep = segmented_products.keep_compiled_kernels.__wrapped__
    folder = tmp_path / "phalanx" / "cuequivariance"
    assert keep() == folder and folder.is_dir()
    assert os.environ["CUEQUIVARIANCE_OPS_NVRTC_CACHE_DIR"] == str(folder)
    assert os.environ["CUEQUIVARIANCE_OPS_PARALLEL_COMPILE"] == "1"
    monkeypatch.setenv("CUEQUIVARIANCE_OPS_NVRTC_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert keep() == tmp_path / "elsewhere"
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUEQUIVARIANCE_OPS_NVRTC_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert keep() is None


def test_cuequivariance_gives_our_energies_forces_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuequivariance_torch", reason="needs the extra cuequivariance")
    used: list[str] = []
    for name in ("sum_coupled", "contract_components"):
        function: Callable[..., Tensor] = getattr(segmented_products, name)
        monkeypatch.setattr(mace, name, lambda *given, f=function, n=name: used.append(n) or f(*given))
    results = []
    for kernels in ("own", "cuequivariance"):
        # Its operations for CPUs take part in the test alone.
        monkeypatch.setattr(mace, "has_kernels", lambda *_: True)
        small = small_model("mace", d_model=4, energy=EnergyHead())
        options = small.mace.model_copy(update={**OPTIONS, "kernels": kernels})
        network = filled_network(small.model_copy(update={"mace": options})).double()
        batch = batch_of([random_structure(1, 4), random_structure(2, 3)])
        found = network.predict(**batch, forces=True)
        forces = found.forces_N3
        loss = found.energy_G.sum() + forces.square().sum()
        gradients = torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)
        results.append([found.energy_G, forces, *(one for one in gradients if one is not None)])
        assert bool(used) == (kernels == "cuequivariance")
    for ours, theirs in zip(*results, strict=True):
        # Its coefficients on a CPU have the digits of float32.
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6 * float(ours.detach().abs().max()))
