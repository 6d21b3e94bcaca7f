"""How much of a step's communication nothing ran beside, and how often the host waited, from a profile of the step.

    python benchmarks/exposed_communication.py runs/RUN/profile/TRACE.json ...

prints it for traces that `training.profile` wrote, in all and for each kind of kernel that communicates. NCCL's SendRecv is
the exchange of an all-to-all. Calls in which the host waits for the device are listed where the trace has the host's calls.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def communication(run: Callable[[], Any], *, keep: bool = True) -> dict[str, float] | None:
    """Milliseconds of one step in which something was communicated, in which nothing else ran beside that, and in all.

    Only what devices do is recorded: recording the host's operations too would slow it down. keep: whether this rank reads
    its recording; others are as slow as this one, and give None.
    """
    activities: set[Any] = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    devices = activities - {torch.profiler.ProfilerActivity.CPU}
    with torch.profiler.profile(activities=devices) as profiler:
        run()
        torch.accelerator.synchronize()
    if not keep:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return communication_in(file)


def communication_in(trace: Path) -> dict[str, float]:
    """The same of a profiler's trace of a step, as `training.profile` writes it, and of each kind of kernel by itself."""
    events = json.loads(trace.read_text())["traceEvents"]
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    busy: dict[Any, float] = {}
    for event in on_device:
        busy[event["args"].get("stream")] = busy.get(event["args"].get("stream"), 0.0) + event["dur"]
    main = max(busy, key=lambda stream: busy[stream], default=None)

    def kind(event: dict[str, Any]) -> str | None:
        collective = re.search(r"[nr]cclDevKernel_(?:Generic_)?([A-Za-z]+)|([nr]ccl)", event["name"], re.IGNORECASE)
        if collective:
            return collective[1] or collective[2]
        # Copies between devices and the barriers before them have a stream of their own.
        return "copies" if event["args"].get("stream") != main else None

    spans: dict[str | None, list[tuple[float, float]]] = {}
    for event in on_device:
        spans.setdefault(kind(event), []).append((event["ts"], event["ts"] + event["dur"]))
    computed = _union(spans.pop(None, []))
    sent = _union(span for of_kind in spans.values() for span in of_kind)
    both = _union([*sent, *computed])
    exposed = {name: _length(_union([*computed, *of_kind])) - _length(computed) for name, of_kind in spans.items()}
    return {
        "communicating_ms": _length(sent) / 1e3,
        "exposed_ms": (_length(both) - _length(computed)) / 1e3,
        "busy_ms": _length(both) / 1e3,
        "span_ms": (both[-1][1] - both[0][0]) / 1e3 if both else 0.0,
        **{f"exposed_ms of {name}": exposed[name] / 1e3 for name in sorted(exposed, key=str)},
        **{f"communicating_ms of {name}": _length(_union(spans[name])) / 1e3 for name in sorted(spans, key=str)},
    }


def host_waits(trace: Path) -> list[dict[str, Any]]:
    """Return the calls of a trace in which the host waits for the device, in order.

    Each with milliseconds from the first kernel to its beginning, its length, and the operation that it was made in: the
    innermost one that the trace has on the same thread.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    first = min((e["ts"] for e in events if e.get("cat") == "kernel"), default=0.0)
    operations = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation") and "dur" in e]
    found = []
    for call in sorted((e for e in events if _WAIT.search(e["name"]) and e.get("cat") == "cuda_runtime"), key=_begin):
        around = [e for e in operations if e["tid"] == call["tid"] and e["ts"] <= call["ts"] <= e["ts"] + e["dur"]]
        found.append(
            {
                "call": call["name"],
                "at_ms": round((call["ts"] - first) / 1e3, 3),
                "ms": round(call["dur"] / 1e3, 3),
                "within": max(around, key=_begin)["name"] if around else None,
            }
        )
    return found


_WAIT = re.compile(r"^(cuda|hip)\w*Synchronize$")


def _begin(event: dict[str, Any]) -> float:
    begin: float = event["ts"]
    return begin


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def main() -> None:
    """Print the figures of traces and the host's waits as JSON, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    for trace in parser.parse_args().traces:
        print(json.dumps({"trace": trace.name, **{name: round(ms, 2) for name, ms in communication_in(trace).items()}}))
        for wait in host_waits(trace):
            print(json.dumps(wait))


if __name__ == "__main__":
    main()
