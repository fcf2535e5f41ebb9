"""Pretraining of one encoder on data sets of any feature widths."""

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub.utils import tqdm
from torch import Tensor
from torch.nn import Linear, Module, ModuleDict, ModuleList, functional

from hf_xai.distributed import seeded_generator
from hf_xai.distributed.processes import Processes
from hf_xai.errors import ConfigError, DataError
from hf_xai.torch_geometric.all_in.config import check_choice, check_integer, check_share
from hf_xai.torch_geometric.all_in.encoder import AllInEncoder
from hf_xai.torch_geometric.all_in.episodes import prototype_logits
from hf_xai.torch_geometric.all_in.pretraining_run import (
    PretrainingResult,
    StateFile,
    restore,
    source_plan,
    state_of,
)
from hf_xai.torch_geometric.all_in.pretraining_sources import Draw, DrawOptions, GraphSource, Sampler
from hf_xai.torch_geometric.all_in.projection import check_seed, projection_seeds
from hf_xai.torch_geometric.all_in.transfer import pooled

if TYPE_CHECKING:
    from accelerate import Accelerator

_SEEDS = 2**62
_FIGURES = 3  # of a draw: source, loss, accuracy


def pretrain(
    encoder: AllInEncoder,
    sources: Sequence[GraphSource],
    *,
    num_steps: int = 500,
    learning_rate: float = 3e-3,
    weight_decay: float = 1e-4,
    schedule: Literal["cosine", "constant"] = "cosine",
    grad_clip: float | None = 1.0,
    draws_per_step: int = 2,
    batch_size: int = 16,
    support_per_class: int = 5,
    queries_per_class: int | None = None,
    max_classes: int | None = 10,
    max_nodes: int = 5000,
    num_projections: int = 1,
    pooling: Literal["mean_std", "sum"] = "mean_std",
    feature_share: float = 1.0,
    edge_dropout: float = 0.0,
    seed: int = 0,
    accelerator: "Accelerator | None" = None,
    resume_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
) -> PretrainingResult:
    r"""Trains one encoder on several data sets at once (ALL-IN, arXiv 2605.04834, step 7; episodes are our choice).

    Every step averages the losses of ``draws_per_step`` draws: of a source, of a batch or an episode of it, and of a
    projection $C$. A draw depends on ``seed`` and its number only, and draws are dealt out to the processes, whose
    gradients are summed once a step: any number of processes gives the same weights, up to the order of sums.

    Args:
        encoder: Trained in place; its parameters that require gradients. Not wrapped: there is no need for
            ``accelerator.prepare``.
        sources: Data sets, each drawn equally often.
        num_steps: Steps of AdamW. This and all that follows: our choice, the paper's values are not known to us.
        learning_rate: Of AdamW.
        weight_decay: Of AdamW.
        schedule: ``"cosine"`` takes the rate to 0.
        grad_clip: Largest norm of all gradients; None for no limit.
        draws_per_step: A multiple of the number of processes.
        batch_size: Graphs of a supervised draw.
        support_per_class: Examples of each class of an episode. A class needs one member more; others stay out.
        queries_per_class: Most queries of each class. None: all other nodes, or ``support_per_class`` graphs.
        max_classes: Most classes of an episode; None for all.
        max_nodes: Of a larger graph a draw takes a part of so many nodes, grown from the nodes of the episode.
        num_projections: Projections of a draw; their states stand beside each other in episodes, and the scores of a
            head are averaged. Cost is linear in it.
        pooling: Readout of graphs.
        feature_share: Smallest share of the features' columns that a draw keeps, > 0; the share is uniform from it
            to 1, the columns are random.
        edge_dropout: Share of edges, with their reverses, that a draw leaves out.
        seed: Of all draws, of dropout and of new heads.
        accelerator: Processes that share the draws; its device and autocast are used.
        resume_dir: Folder, seen by all processes, for the state; a later call goes on from it, on the CPU to the same
            bits on as many processes. It takes the weights of ``encoder`` from there, too.
        checkpoint_every: Steps from one state to the next.

    Returns:
        Heads and history. The encoder's training flags are as before.

    Raises:
        ConfigError: If an argument can't be what it is, or differs between processes.
        DataError: If a source lacks labels or classes, or a loss is not finite.
        ArtifactMismatchError: If ``resume_dir`` belongs to other settings or sources.
    """
    processes = Processes(accelerator)
    with processes.together():
        settings = {
            "num_steps": num_steps,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "schedule": schedule,
            "grad_clip": grad_clip,
            "draws_per_step": draws_per_step,
            "num_projections": num_projections,
            "pooling": pooling,
            "seed": check_seed(seed),
        }
        options = DrawOptions(
            batch_size=batch_size,
            support_per_class=support_per_class,
            queries_per_class=queries_per_class,
            max_classes=max_classes,
            max_nodes=max_nodes,
            feature_share=feature_share,
            edge_dropout=edge_dropout,
        )
        _check(encoder, sources, settings, options, processes, accelerator)
        check_integer("checkpoint_every", checkpoint_every, 1)
        samplers = [Sampler(source, options) for source in sources]
        for sampler in samplers:
            sampler.check_fits(encoder.config)
        plan = settings | asdict(options) | {"encoder": encoder.config.to_dict()}
        plan["sources"] = {sampler.name: source_plan(sampler) for sampler in samplers}
        run = _Run(encoder, samplers, settings, processes, accelerator)
    if any(other != plan for other in processes.exchange(plan)):
        raise ConfigError("All processes must pretrain on the same sources with the same settings.")
    with processes.together():
        state = None if resume_dir is None else StateFile(resume_dir, plan)
        start, tensors = (0, {}) if state is None else state.read()
    if len(set(processes.exchange(start))) > 1:
        raise ConfigError(f"resume_dir {str(resume_dir)!r} must be on a file system that all processes share.")
    flags = {module: module.training for module in encoder.modules()}
    try:
        encoder.train()
        run.begin(tensors)
        bar = tqdm(
            range(start, num_steps),
            "Pretraining",
            initial=start,
            total=num_steps,
            unit="step",
            disable=not processes.is_main,
        )
        with bar:
            for step in bar:
                run.step(step)
                if state is not None and ((step + 1) % checkpoint_every == 0 or step + 1 == num_steps):
                    with processes.together():
                        if processes.is_main:
                            state.write(step + 1, state_of(run.modules, run.optimizer, run.records))
    finally:
        encoder.zero_grad(set_to_none=True)
        run.heads.zero_grad(set_to_none=True)
        for module, flag in flags.items():
            module.training = flag
    return run.result()


class _Run:
    """Encoder, heads and optimizer of one run, and what a step does to them."""

    def __init__(
        self,
        encoder: AllInEncoder,
        samplers: Sequence[Sampler],
        settings: dict[str, Any],
        processes: Processes,
        accelerator: "Accelerator | None",
    ) -> None:
        self.encoder, self.samplers, self.settings = encoder, samplers, settings
        self.processes, self.accelerator = processes, accelerator
        self.device = next(encoder.parameters()).device if accelerator is None else accelerator.device
        self.classes = _head_classes(samplers)
        self.heads = self._new_heads()
        self.targets = [s.targets(self.classes.get(s.source.head_name or s.name, s.classes)) for s in samplers]
        self.records = torch.zeros(0, settings["draws_per_step"], _FIGURES)

    def begin(self, tensors: dict[str, Tensor]) -> None:
        """Moves everything to the device, restores ``tensors`` if there are any, else takes the main's weights."""
        self.modules = ModuleList([self.encoder, self.heads]).to(self.device)
        self.parameters = [p for p in self.modules.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.settings["learning_rate"], weight_decay=self.settings["weight_decay"]
        )
        if tensors:
            restore(self.modules, self.optimizer, tensors)
            self.records = tensors["records"]
        elif self.processes.count > 1:
            from accelerate.utils import broadcast

            for tensor in self.modules.state_dict().values():
                tensor.copy_(broadcast(tensor.clone()))

    def step(self, step: int) -> None:
        """One step of the optimizer; all processes come out of it with the same weights, or with an exception."""
        draws, count = self.settings["draws_per_step"], self.processes.count
        records = torch.zeros(draws, _FIGURES, device=self.device)
        failure: Exception | None = None
        self.optimizer.zero_grad(set_to_none=True)
        try:
            for number in range(self.processes.index, draws, count):
                records[number] = self._draw(step, number)
        except Exception as error:
            failure = error
        self._sum(records, failure)
        for source, loss, _ in records.tolist():
            if not math.isfinite(loss):
                raise DataError(
                    f"The loss of source {self.samplers[int(source)].name!r} is {loss} at step {step}; a smaller "
                    "learning_rate may help."
                )
        self.records = torch.cat([self.records, records.cpu()[None]])
        if self.settings["grad_clip"] is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.settings["grad_clip"])
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step)
        self.optimizer.step()

    def result(self) -> PretrainingResult:
        history = []
        for step, records in enumerate(self.records.tolist()):
            for source, loss, accuracy in records:
                name = self.samplers[int(source)].name
                history.append(
                    {"step": step, "source": name, "loss": loss, "accuracy": None if accuracy < 0 else accuracy}
                )
        scales = {s.name: (s.mean, s.std) for s in self.samplers if s.source.objective == "regression"}
        return PretrainingResult(self.heads, history, self.classes, scales)

    def _draw(self, step: int, number: int) -> Tensor:
        """Adds the gradient of one draw; source, loss and accuracy, the latter -1 where there is none."""
        generator = seeded_generator(self.settings["seed"], step * self.settings["draws_per_step"] + number)
        index = int(torch.randint(len(self.samplers), (), generator=generator))
        seed, dropout_seed = torch.randint(_SEEDS, (2,), generator=generator).tolist()
        sampler = self.samplers[index]
        draw = sampler.draw(generator, self.targets[index])
        with torch.random.fork_rng(devices=[] if self.device.type == "cpu" else [self.device]):
            torch.manual_seed(dropout_seed)
            with nullcontext() if self.accelerator is None else self.accelerator.autocast():
                scores = self._scores(sampler, draw, seed)
        targets = draw.targets.to(self.device)
        if sampler.source.objective == "regression":
            loss, accuracy = functional.l1_loss(scores.float(), targets), -1.0
        else:
            loss = functional.cross_entropy(scores.float(), targets)
            accuracy = float((scores.argmax(dim=1) == targets).float().mean())
        (loss / self.settings["draws_per_step"]).backward()
        return torch.tensor([index, loss.detach(), accuracy], device=self.device)

    def _scores(self, sampler: Sampler, draw: Draw, seed: int) -> Tensor:
        graph, config, queries = draw.graph.to(self.device), self.encoder.config, draw.queries.to(self.device)
        found = []
        for projection_seed in projection_seeds(seed, self.settings["num_projections"]):
            states = self.encoder(
                graph.x,
                graph.edge_index,
                graph.batch,
                graph.edge_weight,
                edge_attr=graph.edge_attr if config.edge_features else None,
                pe=graph.get("pe") if config.pe_dim else None,
                seed=projection_seed,
            )
            found.append(pooled(states, graph.batch, self.settings["pooling"]) if self._pools(sampler) else states)
        if draw.support is not None:
            return prototype_logits(torch.cat(found, dim=1), draw.support.to(self.device), queries)
        head = self.heads[str(sampler.source.head_name)]
        return torch.stack([head(states[queries]) for states in found]).mean(dim=0)

    def _sum(self, records: Tensor, failure: Exception | None) -> None:
        """Sums gradients and records over the processes; an exception on one becomes one on all."""
        if self.processes.count == 1 or self.accelerator is None:
            if failure is not None:
                raise failure
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        parts = [*gradients, records, records.new_tensor([float(failure is not None)])]
        if failure is not None:
            parts = [torch.zeros_like(part) for part in parts[:-1]] + parts[-1:]
        summed = self.accelerator.reduce(torch.cat([part.flatten() for part in parts]), "sum")
        *gradients, found, failed = [
            piece.view_as(part) for piece, part in zip(summed.split([p.numel() for p in parts]), parts, strict=True)
        ]
        if float(failed) > 0:
            with self.processes.together():
                if failure is not None:
                    raise failure
        records.copy_(found)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)

    def _rate(self, step: int) -> float:
        rate = float(self.settings["learning_rate"])
        if self.settings["schedule"] == "constant":
            return rate
        return rate * (1 + math.cos(math.pi * step / self.settings["num_steps"])) / 2

    def _new_heads(self) -> ModuleDict:
        heads: dict[str, Module] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings["seed"])
            for sampler in self.samplers:
                name = sampler.source.head_name
                if name is not None and name not in heads:
                    double = self._pools(sampler) and self.settings["pooling"] == "mean_std"
                    outputs = len(self.classes[name]) if sampler.classes else len(sampler.mean)
                    heads[name] = Linear(self.encoder.out_channels * (1 + double), outputs)
        return ModuleDict(heads).to(next(self.encoder.parameters()).dtype)

    def _pools(self, sampler: Sampler) -> bool:
        return sampler.source.task == "graph"


def _head_classes(samplers: Sequence[Sampler]) -> dict[str, tuple[int, ...]]:
    """Labels of each head, those of all its sources, and of each episodic source."""
    found: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, tuple[Any, ...]] = {}
    for sampler in samplers:
        source = sampler.source
        if source.head_name is None:
            found[source.name] = sampler.classes
            continue
        kind = (source.task, source.objective, len(sampler.mean))
        if kinds.setdefault(source.head_name, kind) != kind:
            raise ConfigError(
                f"Sources with head={source.head_name!r} must agree in task, objective and number of targets, got "
                f"{kinds[source.head_name]} and {kind}."
            )
        if sampler.classes:
            found[source.head_name] = tuple(sorted({*found.get(source.head_name, ()), *sampler.classes}))
    return found


def _check(
    encoder: Any,
    sources: Any,
    settings: dict[str, Any],
    options: DrawOptions,
    processes: Processes,
    accelerator: "Accelerator | None",
) -> None:
    if not isinstance(encoder, AllInEncoder):
        raise ConfigError(f"encoder must be an AllInEncoder, not wrapped, got {type(encoder).__name__}.")
    if not any(parameter.requires_grad for parameter in encoder.parameters()):
        raise ConfigError("No parameter of encoder requires gradients; a head freezes it, requires_grad_() undoes it.")
    if not isinstance(sources, (list, tuple)) or not sources or not all(isinstance(s, GraphSource) for s in sources):
        raise ConfigError("sources must be a list of one or more GraphSource.")
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise ConfigError(f"Names of sources must differ, got {names}.")
    for name, value, least in (
        ("num_steps", settings["num_steps"], 1),
        ("draws_per_step", settings["draws_per_step"], 1),
        ("num_projections", settings["num_projections"], 1),
        ("batch_size", options.batch_size, 1),
        ("support_per_class", options.support_per_class, 1),
        ("queries_per_class", 1 if options.queries_per_class is None else options.queries_per_class, 1),
        ("max_classes", 2 if options.max_classes is None else options.max_classes, 2),
        ("max_nodes", options.max_nodes, 2),
    ):
        check_integer(name, value, least)
    for name, value, zero in (
        ("learning_rate", settings["learning_rate"], False),
        ("weight_decay", settings["weight_decay"], True),
        ("grad_clip", 1.0 if settings["grad_clip"] is None else settings["grad_clip"], False),
        ("feature_share", options.feature_share, False),
    ):
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and not zero):
            raise ConfigError(f"{name} must be a number {'>=' if zero else '>'} 0, got {value!r}.")
    if options.feature_share > 1:
        raise ConfigError(f"feature_share must be at most 1, got {options.feature_share!r}.")
    check_share("edge_dropout", options.edge_dropout)
    check_choice("schedule", settings["schedule"], ("cosine", "constant"))
    check_choice("pooling", settings["pooling"], ("mean_std", "sum"))
    if settings["draws_per_step"] % processes.count:
        raise ConfigError(
            f"draws_per_step must be a multiple of the {processes.count} processes, got {settings['draws_per_step']}."
        )
    if settings["num_steps"] * settings["draws_per_step"] > 2**32:
        raise ConfigError("num_steps * draws_per_step must be at most 2**32.")
    if accelerator is not None and accelerator.mixed_precision == "fp16":
        raise ConfigError("fp16 would need scaled losses; use an Accelerator with bf16 or without mixed precision.")
