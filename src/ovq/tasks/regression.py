"""In-context regression: many linear functions in one sequence, each example naming its own."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from ovq.tasks.base import (
    ContinuousTask,
    Split,
    check_at_least,
    check_curriculum_fraction,
    check_split,
    share_of_curriculum,
)

# Rows of distances that the nearest-neighbour oracle holds at a time.
_BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class InContextRegressionTask(ContinuousTask):
    """Linear functions to be learned from a sequence. A reconstruction: the paper's is not public.

    One example, with ``context_length=8, num_functions=2`` (c identifiers, x points, y values):

                       place  0   1    2   3    4   5    6   7
        inputs   identifier   c1  c1   c2  c2   c1  c1   c2  c2
                 point        x1  x1   x2  x2   x3  x3   x4  x4
                 value        0   y1   0   y2   0   y3   0   y4
                 told         0   1    0   1    0   1    0   1
        targets               y1  NaN  y2  NaN  y3  NaN  y4  NaN

    First a point is asked, then it is told whole, so that one place holds all that there is to
    remember. ``y = (w . x + noise_std * e) / sqrt(1 + noise_std ** 2)``, with x and e standard
    normal and w uniform on the unit sphere, one for each function: y has variance 1 for each
    function, and zeros have an error of 1. The functions take turns in random order, each equally
    often (but for one time), so that :meth:`history` counts up to the same number for all.

    An identifier is a random point on the sphere of radius ``sqrt(code_length)``, another in every
    sequence: its numbers have variance 1, as those of x have. With one-hot identifiers the read-in
    layer would have a column for each function, trained or not, and its width would follow
    ``num_functions``; this way a model can be asked about more functions than it was trained with,
    and no weight can hold one.

    The splits cannot share a sequence: the last bit of the first point's first number (a float32)
    is 0 in training and 1 in evaluation.

    Attributes:
        context_length: places, even, two for each example.
        num_features: ``d``, numbers of x.
        num_functions: ``F``, at most as many as there are examples.
        code_length: ``c``, numbers of an identifier, at least 2.
        noise_std: standard deviation of the noise, where that of ``w . x`` is 1.
        initial_functions: functions at progress 0, from which they grow linearly to
            ``num_functions``; ``None`` for no curriculum.
        curriculum_fraction: progress at which all functions are there, in (0, 1].

    Raises:
        ValueError: a field out of its range.

    >>> task = InContextRegressionTask(context_length=128, num_functions=4)
    >>> example = task.example(torch.Generator().manual_seed(0), split=Split.TRAIN)
    >>> example["inputs"].shape, example["targets"].shape
    (torch.Size([128, 42]), torch.Size([128, 1]))
    >>> error = task.errors(example, task.least_squares(example))
    >>> bool(error[task.history(example).num_earlier[::2] >= 8].max() < 1e-6)
    True
    """

    context_length: int = 512
    num_features: int = 8
    num_functions: int = 8
    code_length: int = 32
    noise_std: float = 0.0
    initial_functions: int | None = None
    curriculum_fraction: float = 0.5

    def __post_init__(self):
        for name in ("context_length", "num_features", "num_functions"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("code_length", self.code_length, 2)
        if self.context_length % 2:
            raise ValueError(f"context_length must be even, got {self.context_length}")
        if self.num_functions > self.num_examples:
            raise ValueError(
                f"num_functions must be at most context_length / 2 = {self.num_examples}, got "
                f"{self.num_functions}"
            )
        noise = self.noise_std
        if not isinstance(noise, int | float) or not 0.0 <= noise < math.inf:
            raise ValueError(f"noise_std must be finite and not negative, got {noise!r}")
        if self.initial_functions is not None:
            check_at_least("initial_functions", self.initial_functions, 1)
            if self.initial_functions > self.num_functions:
                raise ValueError(
                    f"initial_functions must be at most num_functions = {self.num_functions}, got "
                    f"{self.initial_functions}"
                )
        check_curriculum_fraction(self.curriculum_fraction)

    @property
    def num_examples(self) -> int:
        """Points of a sequence, ``E``."""
        return self.context_length // 2

    @property
    def num_inputs(self) -> int:
        """Identifier, point, value, and whether it is told: ``code_length + num_features + 2``."""
        return self.code_length + self.num_features + 2

    @property
    def num_outputs(self) -> int:
        """The value alone."""
        return 1

    def num_functions_at(self, progress: float) -> int:
        """Functions of a sequence at a progress of training in [0, 1]."""
        share = share_of_curriculum(progress, self.curriculum_fraction)
        if self.initial_functions is None:
            return self.num_functions
        return self.initial_functions + int(share * (self.num_functions - self.initial_functions))

    def example(
        self, generator: torch.Generator, *, split: Split, progress: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw one example, as drawn above; see :meth:`ovq.tasks.base.Task.example`."""
        check_split(split)
        E, F, d = self.num_examples, self.num_functions_at(progress), self.num_features
        functions = torch.randperm(E, generator=generator) % F
        codes = _draw_on_sphere(generator, F, self.code_length) * math.sqrt(self.code_length)
        weights = _draw_on_sphere(generator, F, d)
        x = torch.randn(E, d, generator=generator)
        _set_last_bit(x[:1, :1], split is Split.EVALUATE)
        noise = torch.randn(E, generator=generator)
        y = (x * weights[functions]).sum(1) + self.noise_std * noise
        y = (y / math.sqrt(1.0 + self.noise_std**2))[:, None]
        nothing = torch.zeros_like(y)
        asking = torch.cat([codes[functions], x, nothing, nothing], dim=1)
        telling = torch.cat([codes[functions], x, y, torch.ones_like(y)], dim=1)
        inputs = torch.stack([asking, telling], dim=1).flatten(0, 1)
        targets = torch.stack([y, torch.full_like(y, math.nan)], dim=1).flatten(0, 1)
        return {"inputs": inputs, "targets": targets}

    def history(self, example: Mapping[str, Tensor]) -> "History":
        """Function, and number of its earlier examples, at every place of an example."""
        functions = self._functions(example)
        return History(
            function=_by_first_place(functions).repeat_interleave(2),
            num_earlier=_num_earlier(functions).repeat_interleave(2),
        )

    def groups(self, example: Mapping[str, Tensor]) -> dict[str, Bool[Tensor, " T"]]:
        """The questions by earlier examples of their function: 0, 1, 2-3, 4-7, 8-15, ..."""
        earlier, asked = self.history(example).num_earlier, self.asked(example)
        found = {"0 earlier": asked & (earlier == 0)}
        first = 1
        while bool((earlier >= first).any()):
            name = f"{first}-{2 * first - 1} earlier" if first > 1 else "1 earlier"
            found[name] = asked & (earlier >= first) & (earlier < 2 * first)
            first *= 2
        return found

    def errors(
        self, example: Mapping[str, Tensor], predictions: Float[Tensor, " E"]
    ) -> Float[Tensor, " E"]:
        """Squared errors of predictions for the questions of an example, in order, ``[E]``."""
        return (predictions - example["targets"][::2, 0]).square()

    def least_squares(self, example: Mapping[str, Tensor]) -> Float64[Tensor, " E"]:
        """Predict each value by least squares over the function's earlier examples: an oracle.

        Where they leave the weights open, those of smallest norm are taken (with none, zero).

        Args:
            example: as :meth:`example` drew it.

        Returns:
            One prediction for each question, in order, ``[E]`` float64.
        """
        return self._regress(example, self._functions(example))

    def pooled_least_squares(self, example: Mapping[str, Tensor]) -> Float64[Tensor, " E"]:
        """The same over the earlier examples of all functions, as if they were one.

        With several functions its error has no bound where there are about as many examples as
        features, so that a mean over all places says little: look at places after these.
        """
        return self._regress(example, torch.zeros(self.num_examples, dtype=torch.int64))

    def nearest_neighbour(self, example: Mapping[str, Tensor]) -> Float64[Tensor, " E"]:
        """Predict the value of the earlier example that is nearest in identifier and point.

        Args:
            example: as :meth:`example` drew it.

        Returns:
            One prediction for each question, in order, ``[E]`` float64; 0 for the first.
        """
        where = example["inputs"][::2, : self.code_length + self.num_features].double()
        found, rest = _nearest_of_function(where, self.code_length, self._functions(example))
        found[rest], _ = _nearest_earlier(where, rest)
        predictions = self._points(example)[1][found]
        predictions[0] = 0.0
        return predictions

    def _functions(self, example: Mapping[str, Tensor]) -> Int64[Tensor, " E"]:
        """The function of each example, by its identifier, numbered in some order."""
        # Two numbers of 32 bits as one of 64: rows of codes take much longer to sort.
        words = example["inputs"][::2, :2].contiguous().view(torch.int64)
        return words[:, 0].unique(return_inverse=True)[1]

    def _points(
        self, example: Mapping[str, Tensor]
    ) -> tuple[Float64[Tensor, "E d"], Float64[Tensor, " E"]]:
        """x and y of the examples told."""
        told = example["inputs"][1::2, self.code_length :].double()
        return told[:, : self.num_features], told[:, self.num_features]

    def _regress(
        self, example: Mapping[str, Tensor], functions: Int64[Tensor, " E"]
    ) -> Float64[Tensor, " E"]:
        x, y = self._points(example)
        predictions = torch.zeros_like(y)
        for places in _places_of_each(functions):
            predictions[places] = _predict_from_earlier(x[places], y[places])
        return predictions


@dataclass(frozen=True)
class History:
    """What came before each place of an example.

    Attributes:
        function: number of the place's function, in order of first appearance, ``[T]``.
        num_earlier: examples of that function that were told before this one, ``[T]``. Both places
            of an example have the same.
    """

    function: Int64[Tensor, " T"]
    num_earlier: Int64[Tensor, " T"]


def _draw_on_sphere(generator: torch.Generator, number: int, size: int) -> Float32[Tensor, "N K"]:
    """Independent and uniform points on the unit sphere."""
    points = torch.randn(number, size, generator=generator)
    return torch.nn.functional.normalize(points, dim=1)


def _set_last_bit(numbers: Float32[Tensor, "..."], bit: bool) -> None:
    """Change the last bit of the mantissa, in place."""
    bits = numbers.view(torch.int32)
    bits.bitwise_and_(-2).bitwise_or_(int(bit))


def _places_of_each(functions: Int64[Tensor, " E"]) -> Iterator[Int64[Tensor, " P"]]:
    """The places of each function, in order."""
    order = functions.argsort(stable=True)
    yield from order.split(torch.bincount(functions).tolist())


def _num_earlier(functions: Int64[Tensor, " E"]) -> Int64[Tensor, " E"]:
    numbers = torch.empty_like(functions)
    for places in _places_of_each(functions):
        numbers[places] = torch.arange(len(places))
    return numbers


def _nearest_earlier(
    where: Float64[Tensor, "P K"], rows: Int64[Tensor, " R"]
) -> tuple[Int64[Tensor, " R"], Float64[Tensor, " R"]]:
    """For each of the rows the nearest of the points before it, and its distance.

    Without any, the first point, infinitely far.
    """
    found, distance = torch.empty_like(rows), where.new_empty(len(rows))
    for block in torch.arange(len(rows)).split(_BLOCK):
        of_block = rows[block, None]
        distances = torch.cdist(where[rows[block]], where[: int(of_block.max()) + 1])
        later = torch.arange(distances.shape[1]) >= of_block
        nearest = distances.masked_fill_(later, math.inf).min(dim=1)
        found[block], distance[block] = nearest.indices, nearest.values
    return found, distance


def _nearest_of_function(
    where: Float64[Tensor, "E K"], code_length: int, functions: Int64[Tensor, " E"]
) -> tuple[Int64[Tensor, " E"], Int64[Tensor, " R"]]:
    """The nearest earlier example of the same function, and where another may be nearer.

    None can be where it is nearer than the two nearest identifiers are to each other: with few
    functions that leaves few places to search among all.
    """
    found, distance = torch.empty_like(functions), where.new_empty(len(where))
    firsts = []
    for places in _places_of_each(functions):
        own, distance[places] = _nearest_earlier(where[places], torch.arange(len(places)))
        found[places] = places[own]
        firsts.append(places[0])
    codes = where[torch.stack(firsts), :code_length]
    apart = torch.cdist(codes, codes).fill_diagonal_(math.inf).min()
    return found, (distance >= apart).nonzero()[:, 0]


def _by_first_place(functions: Int64[Tensor, " E"]) -> Int64[Tensor, " E"]:
    """The same functions, numbered in order of their first places."""
    firsts = torch.stack([places[0] for places in _places_of_each(functions)])
    return firsts.argsort().argsort()[functions]


def _predict_from_earlier(
    x: Float64[Tensor, "P d"], y: Float64[Tensor, " P"]
) -> Float64[Tensor, " P"]:
    """For each point, the least-squares prediction from those before it, of smallest norm."""
    moments = _sums_before(torch.einsum("pi,pj->pij", x, x))  # [P, d, d]
    sums = _sums_before(y[:, None] * x)  # [P, d]
    inverses = torch.linalg.pinv(moments, rtol=1e-9, hermitian=True)
    return torch.einsum("pi,pij,pj->p", x, inverses, sums)


def _sums_before(terms: Float64[Tensor, "P *shape"]) -> Float64[Tensor, "P *shape"]:
    """At each place the sum of the terms before it."""
    return torch.cat([torch.zeros_like(terms[:1]), terms[:-1].cumsum(dim=0)])
