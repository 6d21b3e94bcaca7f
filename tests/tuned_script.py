"""A run file to tune, and a script that stands for training: a second is enough for it.

What the script does is decided by `training.seed`: it trains, or fails in one of the ways in which training fails. Of
several ranks of a Slurm step all do the same, and the first writes the logs.
"""

from __future__ import annotations

RUN = """\
model: {n_layers: 2, d_model: 32, n_heads: 4, d_ff: 64, vocab_size: 257, max_positions: 64, mlp: gelu}
data: {sources: [data/a], sequence_length: 64}
layout: {global_batch: 8}
optimizer: {lr: 1e-3}
training: {steps: 9}
tune:
  parameters:
    training.seed: SEEDS
    optimizer.lr: {low: 1e-4, high: 1e-1, log: true}
  engine: random
  first: engine
"""
SCRIPT = r"""
import json, os, re, signal, sys, time
step_s, folder = float(sys.argv[1]), sys.argv[2]
rank = os.environ.get("SLURM_PROCID", "0")
part = json.load(open(folder + "/part.json"))
text = open(folder + "/run.yaml").read()
seed, lr = (float(re.search(rf"^  {name}: (.*)$", text, re.M)[1]) for name in ("seed", "lr"))
run = part["run_dir"]
os.makedirs(run, exist_ok=True)
def leave(cause, code, words=""):
    with open(folder + f"/new-{rank}.json", "w") as file:
        json.dump({"cause": cause, "words": words, "ended": time.time(), "memory_bytes": None, "host_bytes": 5e8}, file)
    os.rename(folder + f"/new-{rank}.json", folder + f"/rank-{rank}.json")
    os._exit(code)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
if rank != "0":
    run = folder + f"/others-{rank}"
    os.makedirs(run, exist_ok=True)
done = int(open(run + "/done").read()) if os.path.exists(run + "/done") else 0
def event(kind, step, **more):
    with open(run + "/events.jsonl", "a") as file:
        file.write(json.dumps({"kind": kind, "step": step, **more}) + "\n")
event("resume" if done else "start", done)
begin = time.time()
if seed == 1:
    sys.exit("no such thing")
if seed == 2 and not os.path.exists(run + "/tried"):
    open(run + "/tried", "w").close()
    time.sleep(0.4)
    leave("out_of_memory", 1, "rank 0: out of memory")
if seed == 3:
    leave("non_finite", 1, "rank 0: loss=nan is not finite")
if seed == 4:
    time.sleep(60)
for step in range(done + 1, part["until"] + 1):
    time.sleep(step_s)
    with open(run + "/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "step_seconds": step_s}) + "\n")
    open(run + "/done", "w").write(str(step))
    if asked:
        leave("interrupted", 143, "stopped by signal 15")
event("evaluation", part["until"], loss=1.0 / part["until"] + lr)
event("end", part["until"], seconds=time.time() - begin)
leave("ok", 0)
"""
