"""The target vectors: for each fact the change of one tensor that makes the model give the new answer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_xai.activations import replace_outputs
from hf_xai.errors import DataError
from hf_xai.transformers.editing.architecture import DecoderArchitecture
from hf_xai.transformers.editing.columns import Group
from hf_xai.transformers.editing.config import EditorConfig
from hf_xai.transformers.editing.readout import ReadOut
from hf_xai.transformers.editing.replay import Replay, add_at_positions, at_positions, input_device
from hf_xai.transformers.editing.tokens import EncodedPrompt, PromptEncoder

_PMET_WEIGHT, _PMET_DIVERGENCE = 0.1, 0.01  # [code]


@dataclass(frozen=True)
class TargetProblem:
    r"""Where and how the changes $\delta$ of a stage are optimised.

    $$\min_\delta\; \frac1P \sum_p -\log p(o^* \mid p) + \beta\,KL(p_\delta \,\Vert\, p_0)
      + \gamma \sum_{\text{sites}} \frac{\lVert\delta\rVert}{\lVert v_0\rVert^2},
      \qquad \lVert\delta\rVert \le c\,\lVert v_0\rVert$$

    with the mean over the group's prompts in all context templates, the divergence of the next token of the essence
    prompt, and $v_0$ the site's output on the first plain prompt. [ROME, MEMIT, PMET; code]

    Attributes:
        architecture: The model.
        encoder: Of its tokenizer.
        readout: Its head.
        layer: The layer that the changes are added in.
        sites: Names of the modules to whose outputs they are added.
        config: Steps, rate and weights.
        pmet_rule: Whether an answer that is on top already counts a tenth, and is done once the divergence is at most
            0.01 [PMET, ACE; code].
        from_bottom: Whether every step runs the whole decoder, as the released code does; the result is the same.
    """

    architecture: DecoderArchitecture
    encoder: PromptEncoder
    readout: ReadOut
    layer: int
    sites: tuple[str, ...]
    config: EditorConfig
    pmet_rule: bool = False
    from_bottom: bool = False

    def solve(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        """Optimises the changes of several groups at once; each is what it would be alone.

        Returns:
            ``changes``, ``(groups, sites, hidden_size)``, float32; ``loss``, ``probability`` (of the new answers per
            token, geometric mean over prompts) and ``steps``, ``(groups,)``, all on the CPU.
        """
        run = _Optimization(self, groups)
        while run.active:
            batch = _GroupBatch(self, groups, run.active)
            some = len(run.active) // 2  # as soon as half of the groups are done, the others go on in a smaller batch
            while len(run.active) > some:
                run.step(batch)
        return run.result()


class _GroupBatch:
    """The prompts of some of the groups, and the layers to run again for them."""

    def __init__(self, problem: TargetProblem, groups: Sequence[Group], members: Sequence[int]) -> None:
        self.problem, self.members = problem, tuple(members)
        chosen = [groups[index] for index in members]
        answers = [(row, prompt) for row, group in enumerate(chosen) for prompt in group.prompts]
        essences = [(row, group.essence) for row, group in enumerate(chosen) if group.essence is not None]
        prompts = [prompt for _, prompt in (*answers, *essences)]
        self.rows = torch.tensor([row for row, _ in (*answers, *essences)])
        self.num_answers = len(answers)
        self.batch = problem.encoder.batch(prompts, input_device(problem.architecture))
        self.answers = _Answers([prompt for _, prompt in answers])
        self.replay = Replay.record(problem.architecture, self.batch, 0 if problem.from_bottom else problem.layer)

    def forward(self, changes: Tensor, on_initial: Callable[[int, Tensor], None]) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the layers with the changes in place.

        Args:
            changes: ``(members, sites, hidden_size)``.
            on_initial: Is given the number of a site and what it returned without its change, ``(members, channels)``.

        Returns:
            Mean negative log-likelihood of each member's answers and whether all are on top, ``(members,)``; and the
            log-probabilities of the next token of the essence prompt, ``(members with one, vocabulary)``.
        """
        firsts = torch.tensor([int((self.rows == row).nonzero()[0]) for row in range(len(self.members))])

        def initial(site: int, output: Tensor) -> None:
            on_initial(site, at_positions(output.detach(), self.batch.positions)[firsts.to(output.device)])

        with _changed(self.problem, self.batch.positions, changes[self.rows], initial):
            hidden = self.replay.run()
        count, size = self.num_answers, len(self.members)
        nll, on_top = self.answers.score(self.problem.readout, hidden[:count])
        rows = self.rows[:count].to(nll.device)
        mean_nll = torch.zeros(size).to(nll).index_add(0, rows, nll) / torch.bincount(rows, minlength=size)
        all_on_top = torch.bincount(rows[~on_top], minlength=size) == 0
        if count == len(self.rows):
            return mean_nll, all_on_top, nll.new_zeros(0, 0)
        essence = self.problem.readout(at_positions(hidden[count:], self.batch.positions[count:]))
        return mean_nll, all_on_top, essence.log_softmax(-1)

    @property
    def essence_rows(self) -> Tensor:
        """Row of the member that each essence prompt belongs to."""
        return self.rows[self.num_answers :]


class _Answers:
    """Where the tokens of the answers are predicted, in a batch of prompts."""

    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        pairs = [(row, place) for row, prompt in enumerate(prompts) for place in prompt.predicting]
        self.rows = torch.tensor([row for row, _ in pairs])
        self.places = torch.tensor([place for _, place in pairs])
        self.tokens = torch.tensor([token for prompt in prompts for token in prompt.target_ids])
        self.count = len(prompts)

    def score(self, readout: ReadOut, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Mean negative log-likelihood of each prompt's answer, and whether each of its tokens is on top."""
        log_p = readout(hidden[self.rows.to(hidden.device), self.places.to(hidden.device)]).log_softmax(-1)
        rows, tokens = self.rows.to(log_p.device), self.tokens.to(log_p.device)
        nll = -log_p.gather(-1, tokens[:, None])[:, 0]
        mean = torch.zeros(self.count).to(nll).index_add(0, rows, nll) / torch.bincount(rows, minlength=self.count)
        return mean, torch.bincount(rows[log_p.detach().argmax(-1) != tokens], minlength=self.count) == 0


class _Optimization:
    """The vectors under optimisation. Adam works entry by entry, so that no group knows of the others."""

    def __init__(self, problem: TargetProblem, groups: Sequence[Group]) -> None:
        self.problem, self.config = problem, problem.config
        shape = (len(problem.sites), problem.architecture.hidden_size)
        self.values = [torch.zeros(shape, requires_grad=True) for _ in groups]
        self.adam = torch.optim.Adam(self.values, lr=self.config.v_lr)
        self.initial_norms = torch.zeros(len(groups), len(problem.sites))
        self.essence: dict[int, Tensor] = {}  # log-probabilities without a change
        self.active = list(range(len(groups)))
        self.num_steps = 0
        self.steps, self.loss, self.nll = (torch.zeros(len(groups)) for _ in range(3))

    def step(self, batch: _GroupBatch) -> None:
        """Measures the members of a batch and improves those not done; the last step only measures [code]."""
        self.num_steps += 1
        with torch.enable_grad():
            loss = self._loss(batch)
            rows = [row for row, index in enumerate(batch.members) if index in self.active]
            wanted = [self.values[batch.members[row]] for row in rows]
            if self.num_steps < self.config.v_num_grad_steps and wanted:
                gradients = torch.autograd.grad(loss[rows].sum(), wanted)
        if self.num_steps >= self.config.v_num_grad_steps or not wanted:
            self.active = []
            return
        self.adam.zero_grad()  # Adam passes over those without a gradient
        for value, gradient in zip(wanted, gradients, strict=True):
            value.grad = gradient
        self.adam.step()
        self._clip(batch.members[row] for row in rows)

    def _loss(self, batch: _GroupBatch) -> Tensor:
        members = list(batch.members)
        values = torch.stack([self.values[index] for index in members])
        first = self.num_steps == 1
        nll, on_top, essence = batch.forward(values, partial(self._keep_norm, members) if first else _ignore)
        if first:
            self.essence = {members[int(row)]: essence[place].detach() for place, row in enumerate(batch.essence_rows)}
        divergence = torch.zeros_like(nll)
        if len(essence):
            before = torch.stack([self.essence[members[int(row)]] for row in batch.essence_rows])
            # The direction of all released implementations: sum of p_after (log p_after - log p_before).
            kl = (essence.exp() * (essence - before)).sum(-1)
            divergence = divergence.index_add(0, batch.essence_rows.to(kl.device), kl)
        decay = (values.norm(dim=-1) / self.initial_norms[members].square()).sum(-1).to(nll.device)
        weight = torch.where(on_top, _PMET_WEIGHT, 1.0) if self.problem.pmet_rule else torch.ones_like(nll)
        loss = weight * nll + self.config.kl_factor * divergence + self.config.v_weight_decay * decay
        if not bool(loss.isfinite().all()):
            raise DataError(f"The loss of an edit's target is not finite in layer {self.problem.layer}.")
        done = loss < self.config.early_stop_loss
        if self.problem.pmet_rule:
            # Without an essence prompt there is no divergence to wait for, and the loss alone decides (ours).
            held = torch.zeros_like(done).index_fill(0, batch.essence_rows.to(done.device), True)
            done |= held & on_top & (divergence <= _PMET_DIVERGENCE)
        self._record(members, loss.detach(), nll.detach(), done)
        return loss

    def _keep_norm(self, members: Sequence[int], site: int, initial: Tensor) -> None:
        norms = initial.float().norm(dim=-1).cpu()
        if bool((norms == 0).any()):
            raise DataError(
                f"{self.problem.sites[site]} returns zeros on a prompt to edit, which no change can scale."
            )
        self.initial_norms[list(members), site] = norms

    def _record(self, members: Sequence[int], loss: Tensor, nll: Tensor, done: Tensor) -> None:
        for row, index in enumerate(members):
            if index in self.active:
                self.loss[index], self.nll[index], self.steps[index] = loss[row], nll[row], self.num_steps
        self.active = [index for index in self.active if index not in members or not done[members.index(index)]]

    def _clip(self, indices: Iterator[int]) -> None:
        with torch.no_grad():
            for index in indices:
                value, limit = self.values[index], self.config.clamp_norm_factor * self.initial_norms[index]
                norm = value.norm(dim=-1)
                value.mul_(torch.where(norm > limit, limit / norm, 1.0)[:, None])

    def result(self) -> dict[str, Tensor]:
        return {
            "changes": torch.stack([value.detach() for value in self.values]),
            "loss": self.loss,
            "probability": (-self.nll).exp(),
            "steps": self.steps,
        }


def _ignore(site: int, initial: Tensor) -> None:
    pass


@contextmanager
def _changed(
    problem: TargetProblem, positions: Tensor, changes: Tensor, on_initial: Callable[[int, Tensor], None]
) -> Iterator[None]:
    def replacement(site: int, inputs: Tensor, output: Tensor) -> Tensor:
        on_initial(site, output)
        return add_at_positions(output, positions, changes[:, site])

    replacements = {name: partial(replacement, site) for site, name in enumerate(problem.sites)}
    with replace_outputs(problem.architecture.model, replacements):
        yield


@torch.no_grad()
def answers_on_top(
    architecture: DecoderArchitecture, encoder: PromptEncoder, prompts: Sequence[EncodedPrompt], batch_size: int = 64
) -> list[bool]:
    """Whether the model gives each answer already: each of its tokens is the most probable one."""
    readout, found = ReadOut(architecture), []
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        hidden = Replay.record(
            architecture, encoder.batch(part, input_device(architecture)), len(architecture) - 1
        ).run()
        found += _Answers(part).score(readout, hidden)[1].tolist()
    return found
