"""What f-INE costs: time over plain training, over plain passes, against materialised gradients; memory and bytes."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import Benchmark
from influence_peers import peers
from random_llama import Padding, llama, random_rows
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

from hf_xai.gradients import gradient_products, mean_gradient, per_sample_gradients
from hf_xai.transformers import InfluenceCallback, InfluenceConfig
from hf_xai.transformers.f_ine.row_losses import RowLosses
from hf_xai.transformers.f_ine.targets import target_parameters


class StepClock(TrainerCallback):
    """Seconds of every optimizer step, its callbacks included."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return np.diff(self.marks).tolist()


def train_seconds(settings: Mapping[str, Any], lora: bool, every: int | None) -> list[float]:
    """Seconds of each step of a run, plain for ``every=None``, else in mode ``"online"``."""
    length, vocabulary = settings["length"], settings["model"]["vocab_size"]
    rows = random_rows(settings["batch_size"] * (settings["steps"] + 1), length, vocabulary, seed=1)
    clock, callbacks = StepClock(), []
    if every is not None:
        query = random_rows(settings["query_rows"], length, vocabulary, seed=2)
        config = InfluenceConfig(mode="online", every_n_steps=every, skip_first=0)
        callbacks.append(InfluenceCallback(config, query))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=settings["batch_size"],
            max_steps=settings["steps"] + 1,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        model = llama(settings, lora)
        # The clock comes last, so that what the callback does at the end of a step counts.
        Trainer(model, arguments, train_dataset=rows, data_collator=Padding(), callbacks=[*callbacks, clock]).train()
    return clock.seconds()


def overhead(settings: Mapping[str, Any], lora: bool) -> dict[str, Any]:
    """Ratios of interleaved runs: with every step scored, and every tenth."""
    ratios: dict[str, list[float]] = {"every": [], "tenth": []}
    plain_seconds = []
    for _ in range(settings["repeats"]):
        plain = train_seconds(settings, lora, None)
        every = train_seconds(settings, lora, 1)
        tenth = train_seconds(settings, lora, 10)
        again = train_seconds(settings, lora, None)
        base = median(plain + again)
        plain_seconds.append(base)
        ratios["every"].append(median(every) / base)
        # Medians would drop the one scored step of ten: means of whole tens, trimmed by the plain runs' own noise.
        ratios["tenth"].append(float(np.mean(tenth) / np.mean(plain + again)))
    return {"seconds": median(plain_seconds), **ratios, "predicted": predicted(settings, lora)}


def predicted(settings: Mapping[str, Any], lora: bool) -> float:
    """The sheet's estimate: query rows over batch rows, plus a third of a step for products where layers are full."""
    share = hooked_share(settings)
    return 1 + settings["query_rows"] / settings["batch_size"] + (0.0 if lora else share / 3)


def hooked_share(settings: Mapping[str, Any]) -> float:
    """Share of the multiplications that is in layers with hooks."""
    model = llama(settings)
    chosen = sum(dict(model.named_parameters())[name].numel() for name in target_parameters(model, "all-linear"))
    head = model.get_output_embeddings().weight.numel()
    return chosen / (chosen + head)


def passes(settings: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds of scoring a batch, against a plain pass and against materialised gradients, interleaved."""
    model = llama(settings).eval()
    names, losses = target_parameters(model, "all-linear"), RowLosses(model)
    rows = random_rows(settings["rows"], settings["length"], settings["model"]["vocab_size"], seed=3)
    batch = Padding()(list(rows))
    del batch["attention_mask"]  # no row is padded, and torch.func can't look into a mask
    query = mean_gradient(model, losses, batch, names)
    stacked = {name: grad[None] for name, grad in query.items()}

    def plain() -> Any:
        losses(model, batch).mean().backward()
        model.zero_grad()

    def ghost() -> Tensor:
        return gradient_products(model, losses, batch, stacked)

    def made(backend: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            made = per_sample_gradients(model, losses, batch, names, backend=backend)  # type: ignore[arg-type]
            return sum(rows.flatten(1) @ query[name].flatten() for name, rows in made.items())

        return run

    work = {"plain": plain, "ghost": ghost, "func": made("func"), "hooks_dense": made("hooks"), "loop": made("loop")}
    agree = {name: run() for name, run in work.items() if name != "plain"}
    worst = max(float((agree[name].squeeze() - agree["ghost"].squeeze()).abs().max()) for name in agree)
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    scale = float(agree["ghost"].abs().max())
    return {"seconds": seconds, "largest_difference": worst / scale}


def scale_seconds(settings: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Seconds and bytes of scoring so many rows of a tiny model at one checkpoint, by the library's own scorer."""
    from hf_xai.transformers.f_ine.checkpoint_scoring import RowScorer
    from hf_xai.transformers.f_ine.query import QuerySet

    model = llama(settings).eval()
    losses, vocabulary = RowLosses(model), settings["model"]["vocab_size"]
    rows = random_rows(num_rows, settings["length"], vocabulary, seed=4).with_format(None)
    queries = QuerySet({"query": random_rows(8, settings["length"], vocabulary, seed=5)}, Padding(), losses, 8)
    names = target_parameters(model, "all-linear")
    scorer = RowScorer(
        rows, Padding(), losses, names, InfluenceConfig(), batch_size=settings["batch_size"], noise_batch_size=16
    )
    forget_peak()
    before = peak_bytes()
    start = time.perf_counter()
    found = scorer.score(model, queries, description=f"{num_rows} rows")
    return {
        "rows": num_rows,
        "seconds": time.perf_counter() - start,
        "score_bytes": found.products.nbytes,
        "peak_growth_bytes": peak_bytes() - before,
    }


def scale(bench: Benchmark, num_rows: int) -> dict[str, Any]:
    """The same in a process of its own, whose memory tells; here in a quick run."""
    if bench.quick:
        return scale_seconds(bench.settings["scale"], num_rows)
    return dict(in_fresh_process(f"cost.scale_seconds(settings['scale'], {num_rows})"))


def peak_bytes() -> int:
    """Largest resident memory of this process since it started, or since ``forget_peak``."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # getrusage counts what the parent had when it started this process, too.
    lines = status.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Makes the present memory the largest so far, on Linux; elsewhere the peak is that of the whole process."""
    switch = Path("/proc/self/clear_refs")
    if switch.exists():
        switch.write_text("5", encoding="utf-8")


def peak_of_training(bench: Benchmark, lora: bool, every: int) -> int:
    """Peak memory of a few steps of training, in a process of its own but in a quick run; ``every=0`` is plain."""
    if bench.quick:
        return peak_bytes()
    call = f"cost.train_seconds(settings['cost'] | {{'steps': 3}}, {lora}, {every or None}) and cost.peak_bytes()"
    return int(in_fresh_process(call))


def in_fresh_process(call: str) -> Any:
    """What an expression of this module, ``cost``, and the configuration, ``settings``, gives in another process."""
    here = Path(__file__).parent
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import json, tomllib, torch, influence_cost as cost; "
        f"torch.set_num_threads(1); settings = tomllib.loads(open(sys.argv[2]).read()); print(json.dumps({call}))"
    )
    arguments = [sys.executable, "-c", code, str(here), str(here / "configs" / "f_ine.toml")]
    return json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def run(bench: Benchmark) -> None:
    """Adds the rows of cost and scale, and their bars."""
    settings = bench.settings["cost"]
    torch.set_num_threads(1)
    found = {
        kind: bench.once(f"overhead-{kind}", lambda lora=lora: overhead(settings, lora))
        for kind, lora in (("lora", True), ("full", False))
    }
    for kind, values in found.items():
        peaks = bench.once(
            f"peaks-{kind}", lambda lora=kind == "lora": [peak_of_training(bench, lora, every) for every in (0, 1)]
        )
        bench.row(part="overhead", parameters=kind, **values, peak_plain=peaks[0], peak_online=peaks[1])
    for size in settings["passes"]:
        measured = bench.once(f"passes-{size['name']}", lambda size=size: passes(size, settings["pass_repeats"]))
        medians = {name: median(values) for name, values in measured["seconds"].items()}
        bench.row(
            part="passes", size=size["name"], rows=size["rows"], length=size["length"], **measured, medians=medians
        )
    for peer, values in bench.once("peers", lambda: peers(settings)).items():
        bench.row(part="peer", peer=peer, **values)
    for num_rows in bench.settings["scale"]["rows"]:
        row = bench.once(f"scale-{num_rows}", lambda n=num_rows: scale(bench, n))
        bench.row(part="scale", **row)
