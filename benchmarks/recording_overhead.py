"""What recording costs during ``generate``, on SmolLM2-135M-Instruct in float32: time, memory and forward passes."""

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from statistics import median
from typing import Any

import numpy as np
import torch
from contextual_qa import templated_questions
from harness import Benchmark
from models import smollm2
from torch import Tensor

from hf_xai.metrics import bootstrap_interval, ratio_of_means
from hf_xai.transformers import FeatureGapConfig, FeatureGapHead, FeatureGapLogitsProcessor
from hf_xai.transformers.feature_gaps.prompts import PromptEncoder

HEADS: dict[str, tuple[str, ...]] = {"gaps": (), "gaps+probabilities": ("logprob", "entropy")}
LAYERS = {"context_reliance": 12, "context_comprehension": 20, "honesty": 28}


class RecordingOverhead:
    """Plain and recorded generations in turn, the same prompts and tokens."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.model, self.tokenizer = smollm2(dtype=torch.float32)
        encoder = PromptEncoder(self.tokenizer)
        self.prompts = [
            torch.tensor([encoder.standard(record)]) for record in templated_questions(settings["prompts"], seed=1)
        ]

    def head(self, probabilities: tuple[str, ...]) -> FeatureGapHead:
        """A head with one layer a feature; what its weights are makes no difference to the time."""
        readings = [
            {"feature": feature, "layer": layer, "pooling": "mean", "sign": 1} for feature, layer in LAYERS.items()
        ]
        config = FeatureGapConfig(readings=readings, probabilities=probabilities)
        config.describe_base(self.model, self.tokenizer)
        head = FeatureGapHead(config)
        head.directions.copy_(torch.randn(head.directions.shape, generator=torch.Generator().manual_seed(0)))
        return head

    def generate(self, prompt: Tensor, head: FeatureGapHead | None) -> dict[str, Any]:
        """Seconds of one generation, and inside our code in it; bytes that the recorder holds; the tokens."""
        with nullcontext() if head is None else head.attach(self.model) as recorder:
            processors = [] if recorder is None else [FeatureGapLogitsProcessor(recorder)]
            start = time.perf_counter()
            sequences = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                logits_processor=processors,
                do_sample=False,
                max_new_tokens=self.settings["new_tokens"],
                min_new_tokens=self.settings["new_tokens"],
                pad_token_id=0,
            )
            seconds = time.perf_counter() - start
        found = {"seconds": seconds, "inside": 0.0, "bytes": 0, "tokens": sequences[0].tolist()}
        if recorder is not None:
            held = tensors_in(vars(recorder), {"head", "model"})
            found |= {"inside": recorder.seconds, "bytes": sum(tensor.nbytes for tensor in held)}
        return found

    def measure(self, name: str) -> dict[str, Any]:
        """Shares, ratios and sizes of one head."""
        head = self.head(HEADS[name])
        self.generate(self.prompts[0], head)  # warm up
        pairs = []
        for turn in range(self.settings["repeats"]):
            for prompt in self.prompts:
                order = (None, head) if turn % 2 else (head, None)
                found = {each is not None: self.generate(prompt, each) for each in order}
                assert found[True]["tokens"] == found[False]["tokens"], "recording must not change a token"
                pairs.append((found[False], found[True]))
        recorded = [pair[1]["seconds"] for pair in pairs]
        plain = [pair[0]["seconds"] for pair in pairs]
        ratios = [pair[1]["seconds"] / pair[0]["seconds"] for pair in pairs]
        share = ratio_of_means([pair[1]["inside"] for pair in pairs], recorded)
        return {
            "share": share[0],
            "share_interval": list(share[1:]),
            "wall_ratio": median(ratios),
            "wall_ratio_interval": list(bootstrap_interval(ratios, np.median)),
            "seconds": median(plain),
            "pairs": len(pairs),
            "kilobytes": max(pair[1]["bytes"] for pair in pairs) / 1024,
            "offline_forward_passes": self.offline_passes(head, pairs[0][0]["tokens"]),
        }

    def offline_passes(self, head: FeatureGapHead, tokens: list[int]) -> int:
        """Forward passes that scoring a finished answer takes."""
        passes: list[int] = []
        hook = self.model.register_forward_hook(lambda *_: passes.append(1))
        try:
            head.score_sequences(self.model, torch.tensor([tokens]), self.prompts[0].shape[1])
        finally:
            hook.remove()
        return len(passes)


def tensors_in(values: Any, without: set[str] = frozenset()) -> Iterator[Tensor]:
    """Every tensor that an object's attributes, or a container, hold."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            if key not in without:
                yield from tensors_in(value)
    elif isinstance(values, list | tuple | set):
        for value in values:
            yield from tensors_in(value)
    elif hasattr(values, "__dict__"):
        yield from tensors_in(vars(values))


def run(bench: Benchmark) -> None:
    """Adds a row for each head and the bar of the dearer one."""

    def measured() -> dict[str, Any]:
        overhead = RecordingOverhead(bench.settings["overhead"])
        return {name: overhead.measure(name) for name in HEADS}

    for name, found in bench.once("overhead", measured).items():
        bench.row(part="overhead", head=name, **found)
    rows = [row for row in bench.rows if row["part"] == "overhead"]
    dearest = max(rows, key=lambda row: row["share"])
    bench.bar(
        "record_overhead",
        dearest["share"],
        dearest["share_interval"],
        f"time inside hooks and processor over generate's, head {dearest['head']}; paired wall time beside it",
    )
