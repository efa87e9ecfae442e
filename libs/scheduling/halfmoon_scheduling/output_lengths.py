"""How long answers turn out to be, learnt from those that have ended.

Answers are grouped by tenant and by the length of their prompt (to a power of two), since
what a tenant asks and how much it sends says more than anything else about what comes back.
A group that has seen little yet borrows from all tenants' answers to prompts of that length,
and then from all answers. Each group remembers its latest answers only: habits change.
"""

from bisect import bisect_right, insort
from collections import OrderedDict, deque

#: Answers that a group remembers.
WINDOW = 512
#: Answers that a group must have seen to be asked by itself.
ENOUGH = 32
#: Groups at the most; past it the one unused longest is forgotten. Tenants come from outside.
MAX_GROUPS = 1024

_Group = tuple[str | None, int]


class LengthSample:
    """The latest answers of one group, in tokens."""

    __slots__ = ("_latest", "_sorted")

    def __init__(self) -> None:
        #: In order of their ends; the same lengths as in `_sorted`.
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, n_new: int) -> None:
        """An answer ended after so many tokens."""
        if len(self._latest) == WINDOW:
            oldest = self._latest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._latest.append(n_new)
        insort(self._sorted, n_new)

    def share_over(self, n_new: float) -> float:
        """Share of the answers that are longer than this; 1 when none is known."""
        n = len(self._sorted)
        return 1.0 if n == 0 else 1.0 - bisect_right(self._sorted, n_new) / n

    def quantile(self, q: float) -> int:
        """The length that a share `q` of the answers does not exceed; 0 when none is known."""
        if not self._sorted:
            return 0
        return self._sorted[min(len(self._sorted) - 1, int(q * len(self._sorted)))]

    def check(self) -> None:
        """Audit: both orders hold the same lengths."""
        assert sorted(self._latest) == self._sorted
        assert len(self._latest) <= WINDOW


class OutputLengths:
    """Samples of answers' lengths by group."""

    def __init__(self) -> None:
        #: By (tenant, prompt class), in order of use.
        self._of_tenants: OrderedDict[_Group, LengthSample] = OrderedDict()
        #: By prompt class, of all tenants.
        self._of_classes: dict[int, LengthSample] = {}
        #: Of all answers.
        self.of_all = LengthSample()

    def observe(self, tenant: str, n_prompt: int, n_new: int) -> None:
        """An answer to a prompt of `n_prompt` tokens ended after `n_new` tokens."""
        prompt_class = n_prompt.bit_length()
        group = (tenant, prompt_class)
        sample = self._of_tenants.setdefault(group, LengthSample())
        self._of_tenants.move_to_end(group)
        if len(self._of_tenants) > MAX_GROUPS:
            self._of_tenants.popitem(last=False)
        sample.observe(n_new)
        self._of_classes.setdefault(prompt_class, LengthSample()).observe(n_new)
        self.of_all.observe(n_new)

    def sample(self, tenant: str, n_prompt: int) -> LengthSample:
        """The narrowest group that has seen enough; perhaps an empty one."""
        prompt_class = n_prompt.bit_length()
        for sample in (
            self._of_tenants.get((tenant, prompt_class)),
            self._of_classes.get(prompt_class),
        ):
            if sample is not None and len(sample) >= ENOUGH:
                return sample
        return self.of_all

    def check(self) -> None:
        """Audit: bounds, and each sample by itself."""
        assert len(self._of_tenants) <= MAX_GROUPS
        for sample in (*self._of_tenants.values(), *self._of_classes.values(), self.of_all):
            sample.check()
