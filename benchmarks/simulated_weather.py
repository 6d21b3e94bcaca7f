"""More of the simulated weather that the small ClimaX learns from: SPEEDY (T31, 8 levels), as in the file of 330 days.

    pip install jcm==3.0.0 netCDF4
    python benchmarks/simulated_weather.py OUT --processes 48 --seconds 560

A member is a run of its own. It starts from rest like the 330 days did, but from another random disturbance and on another
date, and its first days are thrown away: SPEEDY is deterministic, so the same start would give the very weather a forecast
is later tested on. Dates lie before those of the 330 days and no two members share any, so OUT and that file make one
source whose splits are told apart by date (`data.gaps: skip`); targets are found by their time, hence no sample
reaches from one member into another. `simulated_weather_check.py` compares the result with the 330 days.

A file appears each ten days and is whole; whatever is there when the time is up can be used. On the CPU each process has one
core and one member. On a GPU one process with many members (`--platform cuda --members 128`) advances them together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FIRST_DAY = "1999-06-01"
"""Members lie before it; the file of 330 days begins on 2000-03-01."""
STRIDE = 600
"""Days from the beginning of one member back to that of the next: no multiple of a year, so they begin in all seasons."""
FILE_DAYS = 10
FRAMES_A_DAY = 2
BETWEEN = 30
"""Days at least between members: far more than any lead time."""
DAY = 86400
LATITUDES = np.arange(-87.1875, 90.0, 5.625)
LONGITUDES = np.arange(0.0, 360.0, 5.625)
LEVELS = {850: 0.835, 500: 0.51, 200: 0.2}
"""Sigma levels under the names of the pressures they come close to."""
UNITS = {
    **{f"temperature_{level}": "K" for level in LEVELS},
    **{f"u_component_of_wind_{level}": "m s-1" for level in LEVELS},
    **{f"v_component_of_wind_{level}": "m s-1" for level in LEVELS},
    "geopotential_500": "m2 s-2",
    "specific_humidity_850": "kg kg-1",
    "2m_temperature": "K",
    "10m_u_component_of_wind": "m s-1",
    "10m_v_component_of_wind": "m s-1",
    "surface_pressure": "Pa",
    "precipitation_rate": "g m-2 s-1",
}
"""Variables, in the order `fields_of` gives them."""


class Simulation(NamedTuple):
    """SPEEDY with its boundary data."""

    start: Callable[[int], Any]
    """State of a member as it begins."""
    advance: Callable[[Any], tuple[Any, Any]]
    """States, and fields [frames, members, V, H, W], FILE_DAYS later."""
    stack: Callable[[list[Any]], Any]
    """Makes one state of those of several members."""


def main() -> None:
    """Simulate in this process or, of several, in new ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--members", type=int, default=1, help="in each process")
    parser.add_argument(
        "--first-member", type=int, default=1, help="number of the first one: its dates and disturbance"
    )
    parser.add_argument("--days", type=int, default=500, help="of each member, at most")
    parser.add_argument("--spin-up", type=int, default=60, help="days thrown away first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ends before so many have passed")
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--core", type=int, help="CPU core of the first process; the others take those after it")
    options = parser.parse_args()
    if options.days % FILE_DAYS or options.spin_up % FILE_DAYS:
        parser.error(f"--days and --spin-up must be multiples of {FILE_DAYS}")
    if options.days + options.spin_up > STRIDE - BETWEEN:
        parser.error(f"--days and --spin-up must not exceed {STRIDE - BETWEEN} together, or members would share dates")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.processes == 1:
        print(json.dumps(simulate(options)))
    else:
        sys.exit(in_processes(options))


def in_processes(options: argparse.Namespace) -> int:
    """Start all, wait for all and sum up what they say; gives the exit status."""
    began = time.time()
    running = []
    for number in range(options.processes):
        words = [sys.executable, __file__, options.out, "--members", options.members, "--days", options.days]
        words += ["--first-member", options.first_member + number * options.members, "--spin-up", options.spin_up]
        words += ["--seconds", options.seconds, "--platform", options.platform]
        if options.core is not None:
            words += ["--core", options.core + number]
        log = (options.out / f"process-{number:03}.log").open("w")
        running.append(subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=log, text=True))
    said = [process.communicate()[0] for process in running]
    failed = [number for number, process in enumerate(running) if process.returncode]
    days = sum(json.loads(text)["days"] for text, process in zip(said, running, strict=True) if not process.returncode)
    summary = {"days": days, "seconds": round(time.time() - began, 1), "failed": failed, "jcm": version("jcm")}
    (options.out / "summary.json").write_text(json.dumps(summary) + "\n")
    print(json.dumps(summary))
    return 1 if failed else 0


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    """Run the members of one process, a file of each every FILE_DAYS; gives days written and seconds taken."""
    began = time.time()
    settle(options)
    simulation = build()
    members = range(options.first_member, options.first_member + options.members)
    states = simulation.stack([simulation.start(member) for member in members])
    written, slowest = 0, 0.0
    for first_day in range(-options.spin_up, options.days, FILE_DAYS):
        before = time.time()
        if before - began + 1.1 * slowest > options.seconds:
            break
        states, fields = simulation.advance(states)
        fields = np.asarray(fields)
        if not np.isfinite(fields).all():
            raise SystemExit(f"values that are no numbers after day {first_day} in members {members}")
        if first_day >= 0:
            for column, member in enumerate(members):
                write(options.out, member, options.spin_up + first_day, fields[:, column])
            written += FILE_DAYS * len(members)
        # The first includes compilation.
        slowest = max(slowest, time.time() - before) if first_day > -options.spin_up else 0.0
        print(f"to day {first_day + FILE_DAYS}: {time.time() - began:.1f} s", file=sys.stderr, flush=True)
    return {"days": written, "seconds": round(time.time() - began, 1), "slowest": round(slowest, 2)}


def settle(options: argparse.Namespace) -> None:
    """What jax and its libraries read as they are loaded: one core a process, and no look for files elsewhere."""
    os.environ |= {"JAX_PLATFORMS": options.platform, "HF_HUB_OFFLINE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if options.platform == "cpu":
        os.environ |= {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
        if options.core is not None:
            os.sched_setaffinity(0, {options.core})


def build() -> Simulation:
    """SPEEDY with the climatological boundary data that jcm brings along."""
    jax, jdt = import_module("jax"), import_module("jax_datetime")
    # Tensor cores would round the spectral transforms to 10 bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    boundary = boundary_data()
    loaded = import_module("jcm.configurations").load(
        "speedy-t31", **{"terrain.file": str(boundary / "terrain.nc"), "forcing.file": str(boundary / "forcing.nc")}
    )
    model, forcing = loaded.model, loaded.run_kwargs["forcing"]
    regrid = regridding(model)

    def start(member: int) -> Any:
        began = jdt.to_datetime(FIRST_DAY) - jdt.Timedelta(days=np.int32(member * STRIDE))
        return state_of(model.initial_state(random_seed=member), model.initial_physics_carry(), began, np.int32(0))

    def to_next_frame(state: Any) -> tuple[Any, Any]:
        after, prediction = model.run_from_state_with_carry(
            forcing=forcing, save_interval=1 / FRAMES_A_DAY, total_time=1 / FRAMES_A_DAY, **state
        )
        then = state_of(after.dynamics, after.physics, after.time, after.step)
        return then, regrid(fields_of(model, prediction))

    def advance(states: Any) -> Any:
        def all_members(states: Any, _: None) -> Any:
            return jax.vmap(to_next_frame)(states)

        return jax.lax.scan(all_members, states, length=FRAMES_A_DAY * FILE_DAYS)

    def stack(states: list[Any]) -> Any:
        return jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *states)

    return Simulation(start, jax.jit(advance), stack)


def state_of(dynamics: Any, physics: Any, time: Any, step: Any) -> dict[str, Any]:
    """All that a member goes on from, as jcm's model takes it."""
    return {"initial_state": dynamics, "initial_physics_state": physics, "initial_time": time, "initial_step": step}


def boundary_data() -> Path:
    """The folder of jcm with terrain and climatological forcing."""
    return Path(str(import_module("jcm").__file__)).parent / "data" / "bc" / "t30" / "clim"


def fields_of(model: Any, prediction: Any) -> Any:
    """What is kept of one frame, [V, longitudes, latitudes] of the model's own grid."""
    jnp = import_module("jax.numpy")
    state = prediction.dynamics
    physics = model.physics.data_struct_to_dict(prediction.physics, nodal_shape=state.u_wind.shape[1:])
    sigma = np.asarray(model.coords.vertical.centers)
    rows = {level: int(np.abs(sigma - wanted).argmin()) for level, wanted in LEVELS.items()}
    upper = [field[0, rows[level]] for field in (state.temperature, state.u_wind, state.v_wind) for level in LEVELS]
    upper += [state.geopotential[0, rows[500]], state.specific_humidity[0, rows[850]]]
    surface = [physics[f"surface_flux.{name}"][0] for name in ("t0", "u0", "v0")]
    surface.append(1e5 * state.normalized_surface_pressure[0])
    surface.append(physics["condensation.precls"][0] + physics["convection.precnv"][0])
    return jnp.stack(upper + surface)


def regridding(model: Any) -> Callable[[Any], Any]:
    """Bilinear interpolation [V, longitudes, latitudes] -> [V, H, W], to the grid of the file of 330 days."""
    jnp = import_module("jax.numpy")
    east, sine = (np.asarray(axis, dtype=np.float64) for axis in model.coords.horizontal.nodal_axes)
    # The first meridian comes again at the end.
    around = interpolation(np.append(np.degrees(east), 360.0), LONGITUDES)
    around[:, 0] += around[:, -1]
    northward = interpolation(np.degrees(np.arcsin(sine)), LATITUDES)
    around, northward = (jnp.asarray(matrix, dtype=jnp.float32) for matrix in (around[:, :-1], northward))

    def regrid(fields: Any) -> Any:
        return jnp.einsum("vxy,wx,hy->vhw", fields, around, northward)

    return regrid


def interpolation(known: Array, wanted: Array) -> Array:
    """[wanted, known]: weights of linear interpolation between ascending points, and of extrapolation beyond them."""
    before = np.clip(np.searchsorted(known, wanted) - 1, 0, len(known) - 2)
    part = (wanted - known[before]) / (known[before + 1] - known[before])
    weights = np.zeros((len(wanted), len(known)))
    rows = np.arange(len(wanted))
    weights[rows, before] = 1.0 - part
    weights[rows, before + 1] = part
    return weights


def write(folder: Path, member: int, day: int, fields: Array) -> None:
    """One file of fields [frames, V, H, W] from `day` after the member began, in 16 bits a value like the 330 days."""
    netcdf = import_module("netCDF4")
    path = folder / f"member-{member:04}-{day // FILE_DAYS:03}.nc"
    partial = path.with_suffix(".partial")
    with netcdf.Dataset(partial, "w") as dataset:
        dataset.title = f"SPEEDY (T31 L8) simulated global weather, 12-hourly, member {member}"
        dataset.source = (
            f"benchmarks/simulated_weather.py, jcm {version('jcm')} (Apache-2.0), its climatological forcing"
        )
        for name, values, units in coordinates(member, day, len(fields)):
            dataset.createDimension(name, len(values))
            variable = dataset.createVariable(name, values.dtype, (name,))
            variable.units = units
            variable[:] = values
        dataset["time"].calendar = "proleptic_gregorian"
        for name, values in zip(UNITS, np.moveaxis(fields, 1, 0), strict=True):
            low, high = float(values.min()), float(values.max())
            variable = dataset.createVariable(name, "i2", ("time", "lat", "lon"), fill_value=-32768)
            variable.units = UNITS[name]
            variable.add_offset, variable.scale_factor = (high + low) / 2, (high - low) / 65000 or 1.0
            variable[:] = values
    partial.replace(path)


def coordinates(member: int, day: int, frames: int) -> Iterator[tuple[str, Array, str]]:
    """Name, values and units of each dimension of a file."""
    began = (
        (np.datetime64(FIRST_DAY) - np.timedelta64(member * STRIDE - day, "D")).astype("datetime64[s]").astype(np.int64)
    )
    # A frame stands for the moment at the end of its step.
    yield "time", began + np.arange(1, frames + 1) * (DAY // FRAMES_A_DAY), "seconds since 1970-01-01"
    yield "lat", LATITUDES, "degrees_north"
    yield "lon", LONGITUDES, "degrees_east"


if __name__ == "__main__":
    main()
