"""Chooses the tokens of a step for all of its rows at once, on the device of the logits; only the tokens are copied
back.

A request draws one number in [0, 1) for each token, from a generator of its own on the host. Its token is where the
distribution function over the vocabulary (after ``penalties``, temperature, top-k and top-p) passes that number. So,
given the logits, results depend on the seed alone, not on the batch or the device. ``tests/sampling_reference.py`` is
the same for one request, slow and obvious.

Nothing sorts the vocabulary in the usual case: whatever top-k and top-p keep is nearly always among the ``CANDIDATES``
most likely tokens. The returned token also tells whether that was the case, so the host need not wait for the device to
find out; the other rows are drawn again from all tokens.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch.nn.functional import pad

from mpic.engine.base import Sampling, TokenLogprob
from mpic.engine.native.penalties import Seen, adjusted
from mpic.errors import IntegrityError
from mpic.kernels.upload import send, upload

log = logging.getLogger(__name__)

CANDIDATES = 1024
"""Tokens among which a truncated distribution is looked for first."""
_PART = 512
"""Tokens whose weights are added up first when the whole vocabulary is drawn from."""
_BELOW_ONE = 1 - 2.0**-32
"""Largest number drawn, so that its product with a sum stays below the sum."""
_WIDE = 16
"""Tokens of a request that are drawn from all tokens at once after one that had to be."""
_BINS, _BINS_PER_E = 2048, 64
"""Bins by which a wide top-p is counted, and how many of them make a factor of e in probability."""
_STEEPEST = 1e30
"""Largest 1 / temperature in fp32: a temperature of almost 0 shall not make 0 / 0 of the best token's weight."""
_NO_NUMBERS, _AGAIN = -1, -2
"""In place of a token: the logits are not numbers; more than the candidates are needed."""

Choice = tuple[int, TokenLogprob | None]
"""A token and, if asked for, its log-probability (of the model's own distribution, before temperature and
truncation)."""


class Sampler:
    """Draws one request's tokens. It has its own random generator and takes one number for each token, so that no batch
    can change a result; a preempted request keeps it.

    Attributes:
        seen: the tokens before, for penalties.
        wide: number of further tokens for which the candidates are not tried, because they were too few for the last
            ones.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling, self.seen, self.wide = sampling, Seen(sampling), 0
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> float:
        """Return the request's next number, in [0, 1)."""
        return min(float(torch.rand((), dtype=torch.float64, generator=self._generator)), _BELOW_ONE)


def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Choice | Exception]:
    """Choose a token for every row.

    Args:
        logits: ``[rows, vocabulary]`` fp32, on any device.
        samplers: the samplers of the rows' requests.

    Returns:
        The choice of each row, or an error that concerns this row alone.
    """
    return Drawing(logits, samplers).choices()


class Drawing:
    """The tokens of a step, which the device may still be drawing. The arguments are those of ``choose``.

    Args:
        mask: the tokens that each row may draw (``mpic.engine.grammar.Constraints.mask``); None: all of them.

    Attributes:
        tokens: ``[rows]`` int64 on the device: a token of each row, or a negative code where the host has to take part.
            None when it has to from the start.
        found: the same numbers on the host, as soon as ``choices`` has returned; empty when there are none.
    """

    def __init__(
        self, logits: torch.Tensor, samplers: Sequence[Sampler], mask: torch.Tensor | None = None
    ) -> None:
        self._own, self._samplers = logits, samplers
        masked = logits if mask is None else _masked(logits, mask)
        self._logits = adjusted(masked, [s.sampling for s in samplers], [s.seen for s in samplers])
        self._numbers = [0.0 if s.sampling.temperature == 0 else s.next() for s in samplers]
        self.tokens: torch.Tensor | None = None
        self.found: list[int] = []
        if any(sampler.wide for sampler in samplers):
            return
        with suppress(Exception):  # which `choices` meets again, reports and keeps to one row
            tokens = _draw(self._logits, [sampler.sampling for sampler in samplers], self._numbers)
            self._read = _fetch(tokens)
            self.tokens = tokens

    def keep_logits(self) -> None:
        """Copy the logits, whose memory the next step overwrites. Rows that want log-probabilities are not among
        them."""
        if self._logits is self._own:
            self._logits = self._own.clone()

    def choices(self) -> list[Choice | Exception]:
        """Wait for the tokens, and return the choice of each row, or an error that concerns this row alone."""
        logits, own, samplers, numbers = self._logits, self._own, self._samplers, self._numbers
        try:
            if self.tokens is not None:
                self.found = self._read()
                # in most steps nothing else is to be done
                if min(self.found) >= 0 and all(s.sampling.logprobs is None for s in samplers):
                    return [(token, None) for token in self.found]
            return _choose(logits, own, samplers, numbers, list(self.found))
        except Exception:  # the options of one request must not fail the others
            log.exception("the tokens of a step could not be drawn together, and are drawn one by one")
        choices: list[Choice | Exception] = []
        for row, (sampler, number) in enumerate(zip(samplers, numbers, strict=True)):
            try:
                one = slice(row, row + 1)
                choices += _choose(logits[one], own[one], [sampler], [number])
            except Exception as error:
                choices.append(error)
        return choices


def _fetch(tokens: torch.Tensor) -> Callable[[], list[int]]:
    """Start to copy tokens to the host, in front of whatever the device is given next; return what waits for them."""
    if tokens.device.type != "cuda":
        return tokens.tolist
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()
    # on the stream of their own device: another one may be current
    copied.record(torch.cuda.current_stream(tokens.device))

    def read() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return read


@torch.inference_mode()
def _masked(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits, with minus infinity for the tokens that a row may not draw."""
    if logits.device.type == "cpu":  # NumPy's is faster than torch's
        bytes_ = mask.numpy().view(np.uint8)
        allowed = np.unpackbits(bytes_, axis=1, count=logits.shape[1], bitorder="little").view(bool)
        return torch.from_numpy(np.where(allowed, logits.numpy(), np.float32(-np.inf)))
    words = send(mask, logits.device)
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


@torch.inference_mode()
def _choose(
    logits: torch.Tensor,
    own: torch.Tensor,
    samplers: Sequence[Sampler],
    numbers: Sequence[float],
    tokens: list[int] | None = None,
) -> list[Choice | Exception]:
    """Do the work of ``choose``, with the numbers that the samplers have drawn, and the rows' tokens where they are
    known; ``own`` are the model's logits, without a mask."""
    options = [sampler.sampling for sampler in samplers]
    tried = [row for row, sampler in enumerate(samplers) if not sampler.wide and not tokens]
    tokens = tokens or [_AGAIN] * len(samplers)
    if len(tried) == len(tokens):
        tokens = _draw(logits, options, numbers).tolist()
    elif tried:
        selected = [options[row] for row in tried], [numbers[row] for row in tried]
        for row, token in zip(tried, _draw(logits[tried], *selected).tolist(), strict=True):
            tokens[row] = token
    again = [row for row, token in enumerate(tokens) if token == _AGAIN]
    for row in again:
        samplers[row].wide = (samplers[row].wide or _WIDE) - 1
    for cut in (_nucleus, _cut):  # one draw for the rows without top-k, one for those with it
        rows = [row for row in again if (cut is _cut) == bool(options[row].top_k)]
        if rows:
            of = _table(options, numbers, rows, logits)
            redrawn = cut(logits[of.pop("rows")[:, 0]], of)
            for row, token in zip(rows, redrawn.tolist(), strict=True):
                tokens[row] = token
    logprobs = _logprobs(own, tokens, options)
    return [
        (token, logprobs.get(row)) if token >= 0 else IntegrityError("the model's logits are not numbers")
        for row, token in enumerate(tokens)
    ]


def _draw(logits: torch.Tensor, options: Sequence[Sampling], numbers: Sequence[float]) -> torch.Tensor:
    """Return a token or a negative code for each row, ``[rows]`` int64 on the device, without waiting for the
    device."""
    if logits.device.type == "cpu" and all(s.temperature == 0 for s in options):
        return _greedy(logits)
    return _draw_by_kind(logits, options, numbers)


@torch.inference_mode()
def _draw_by_kind(
    logits: torch.Tensor, options: Sequence[Sampling], numbers: Sequence[float]
) -> torch.Tensor:
    """Do the work of ``_draw``, once for each kind of sampling."""
    kinds: dict[str, list[int]] = {"greedy": [], "whole": [], "cut": []}
    for row, s in enumerate(options):
        kind = "greedy" if s.temperature == 0 else "cut" if s.top_k or s.top_p < 1 else "whole"
        kinds[kind].append(row)
    order = [row for rows in kinds.values() for row in rows]
    if order == kinds["greedy"]:
        return _greedy(logits)
    table = _table(options, numbers, order, logits)
    parts, start = [], 0
    for kind, rows in kinds.items():
        if not rows:
            continue
        of = {name: column[start : start + len(rows)] for name, column in table.items()}
        mine = logits if len(rows) == len(logits) else logits[of["rows"][:, 0]]
        start += len(rows)
        if kind == "greedy":
            parts.append(_greedy(mine))
        elif kind == "whole":
            parts.append(_whole(_weights(mine, of["temperature"]), of["number"]))
        else:
            parts.append(_cut(mine, of, CANDIDATES))
    rows = table["rows"][:, 0]
    return torch.empty_like(rows).index_copy_(0, rows, torch.cat(parts))


def _table(
    options: Sequence[Sampling], numbers: Sequence[float], rows: Sequence[int], logits: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the sampling parameters of some rows, ``[rows, 1]`` each, on the device of the logits."""
    chosen, vocabulary = [options[row] for row in rows], logits.shape[1]
    columns = {
        "rows": np.array(rows, np.int64),
        "temperature": np.array([s.temperature or 1.0 for s in chosen], np.float64),
        "number": np.array([numbers[row] for row in rows], np.float64),
        "top_p": np.array([s.top_p for s in chosen], np.float64),
        "top_k": np.array([min(s.top_k or vocabulary, vocabulary) for s in chosen], np.int64),
    }
    return upload({name: column[:, None] for name, column in columns.items()}, logits.device)


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely tokens, of equal ones the first."""
    if logits.device.type == "cpu":  # NumPy's is faster than torch's; for both NaN is the largest
        table = logits.numpy()
        best = table.argmax(-1)
        best[np.isnan(table[np.arange(len(table)), best])] = _NO_NUMBERS
        return torch.from_numpy(best)
    tokens = logits.argmax(-1, keepdim=True)
    return tokens.masked_fill(logits.gather(1, tokens).isnan(), _NO_NUMBERS)[:, 0]


def _weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return ``exp((logit - largest) / temperature)`` in fp32."""
    steepness = temperature.reciprocal().clamp_max(_STEEPEST).float()
    return (logits - logits.amax(-1, keepdim=True)).mul_(steepness).exp_()


def _passed(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first column at which the running sums ``ends [rows, n]`` fp64 pass ``target [rows, 1]``."""
    return torch.searchsorted(ends, target, right=True).clamp_max_(ends.shape[1] - 1)


def _sums(parts: torch.Tensor) -> torch.Tensor:
    """Return the sums of ``parts [..., 512]`` in fp64. A few fp32 numbers are added first, since turning all of them
    into fp64 takes longer than everything else."""
    return parts.unflatten(-1, (-1, 16)).sum(-1).sum(-1, dtype=torch.float64)


def _in_parts(weights: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, parts, 512]`` of ``[rows, vocabulary]``, the last part filled up with zeros."""
    spare = -weights.shape[1] % _PART
    return (pad(weights, (0, spare)) if spare else weights).unflatten(1, (-1, _PART))


def _whole(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Draw from the whole vocabulary by ``weights [rows, vocabulary]``: first a part of tokens, then a token of that
    part."""
    parts = _in_parts(weights)
    ends = _sums(parts).cumsum(-1)
    target = number * ends[:, -1:]
    part = _passed(ends, target)
    inside = parts.take_along_dim(part[..., None], 1)[:, 0].double().cumsum(-1)
    # the same numbers summed in another order: the remainder may exceed the part's own sum by a rounding error
    left = target - pad(ends, (1, 0)).gather(1, part)
    tokens = part * _PART + _passed(inside, torch.minimum(left, inside[:, -1:] * _BELOW_ONE))
    return tokens.masked_fill(~ends[:, -1:].isfinite(), _NO_NUMBERS)[:, 0]


def _cut(logits: torch.Tensor, of: dict[str, torch.Tensor], candidates: int | None = None) -> torch.Tensor:
    """Draw from the tokens that top-k and top-p keep, if they are among the most likely ``candidates`` (None: all)."""
    vocabulary = logits.shape[1]
    candidates = min(candidates or vocabulary, vocabulary)
    if candidates < vocabulary:
        # the lower id first among equals
        tokens = logits.topk(candidates, sorted=False).indices.sort(-1).values
        values, order = logits.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(1, order)
    else:
        values, tokens = logits.sort(dim=-1, descending=True, stable=True)
    weights = ((values - values[:, :1]).double() / of["temperature"]).exp()
    limited = of["top_k"] < vocabulary
    rank = torch.arange(values.shape[1], device=logits.device)
    weights = weights.masked_fill(rank >= of["top_k"], 0)
    total = _sums(_in_parts(_weights(logits, of["temperature"]))).sum(-1, keepdim=True)
    total = torch.where(limited, weights.sum(-1, keepdim=True), total)
    kept = (weights.cumsum(-1) - weights < of["top_p"] * total) | (of["top_p"] >= 1)
    kept &= rank < of["top_k"]
    weights = weights.masked_fill(~kept, 0)
    tokens, order = tokens.sort(-1)
    ends = weights.gather(1, order).cumsum(-1)
    drawn = tokens.gather(1, _passed(ends, of["number"] * ends[:, -1:]))
    if candidates < vocabulary:
        # a token equal to the last candidate may have been left out, so the last token kept must be more likely than
        # that
        worst = values.masked_fill(~kept, float("inf")).amin(-1, keepdim=True)
        # and top-p is a share of all that top-k keeps, whose sum is not known where that is more than the candidates
        unknown = limited & (of["top_k"] > candidates)
        # nothing has been left out where a mask allows fewer tokens
        more = values[:, -1:] > float("-inf")
        drawn = drawn.masked_fill(more & (unknown | (worst <= values[:, -1:])), _AGAIN)
    return drawn.masked_fill(~total.isfinite(), _NO_NUMBERS)[:, 0]


def _nucleus(logits: torch.Tensor, of: dict[str, torch.Tensor]) -> torch.Tensor:
    """Draw from a top-p of any width, row by row. Tokens are counted by their distance from the best one in bins; only
    those of the bin in which ``top_p`` is reached are sorted. It waits for the device."""
    drawn = []
    for row, temperature, top_p, number in zip(
        logits, of["temperature"], of["top_p"], of["number"], strict=True
    ):
        steepness = temperature.reciprocal().clamp_max(_STEEPEST).float()
        distance = (row.amax() - row).mul_(steepness)
        # NaN, which becomes a token nobody can take, is no bin
        bins = (distance * _BINS_PER_E).clamp_max_(_BINS - 1).long().clamp_min_(0)
        weights = distance.neg_().exp_()
        sums = torch.zeros(_BINS, dtype=torch.float64, device=row.device)
        sums.scatter_add_(0, bins, weights.double())
        wanted = top_p * sums.sum()
        above = sums.cumsum(0) - sums
        edge = (above < wanted).sum() - 1
        tokens = (bins == edge).nonzero()[:, 0]
        values, order = row[tokens].sort(descending=True, stable=True)
        mine = ((values - row.amax()).double() / temperature).exp()
        inside = above[edge] + mine.cumsum(0) - mine < wanted
        kept = bins < edge
        kept[tokens[order[inside]]] = True
        drawn.append(_whole(weights.mul_(kept)[None], number[None]))
    return torch.cat(drawn)


def _logprobs(
    logits: torch.Tensor, tokens: Sequence[int], options: Sequence[Sampling]
) -> dict[int, TokenLogprob]:
    """Return log-probabilities for the rows that ask for them, in one transfer."""
    asked = [
        (row, min(s.logprobs, logits.shape[1]))
        for row, s in enumerate(options)
        if s.logprobs is not None and tokens[row] >= 0
    ]
    if not asked:
        return {}
    rows = [row for row, _ in asked]
    table = upload(
        {"rows": np.array(rows), "tokens": np.array([[tokens[row]] for row in rows])}, logits.device
    )
    logprobs = torch.log_softmax(logits[table["rows"]], -1)
    top = logprobs.topk(max(count for _, count in asked), -1)
    found = torch.cat(
        [logprobs.gather(1, table["tokens"]).double(), top.values.double(), top.indices.double()], 1
    )
    made = {}
    for (row, count), (own, *rest) in zip(asked, found.tolist(), strict=True):
        values, ids = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        pairs = zip(map(int, ids[:count]), values[:count], strict=True)
        made[row] = TokenLogprob(tokens[row], own, tuple(pairs))
    return made
