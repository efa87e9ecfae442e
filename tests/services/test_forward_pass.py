"""Which KV a prefill's forward pass hands on to the landing, and after which layers."""

from collections.abc import Sequence

import pytest

from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_engine.interface import LayerHook, Run, StageActivations, TokenResult
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import StartPrefill
from halfmoon_protocol.regions import Landing, Region
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.clock import FakeClock
from halfmoon_scheduling.prefill.prefill_queue import PrefillChunk
from halfmoon_transfer.interface import Op, Piece, Report, Transfer
from halfmoon_transfer.transfers.fast_path import FinishedTransfer
from halfmoon_workers.prefill.forward_pass import PrefillForward
from halfmoon_workers.prefill.prefill_job import PrefillJob

N_LAYERS = 3
POOL = Region("prefill-0", 1, bytes(16), 1 << 30)


class LayerCounter(FakeEngine):
    """Computes nothing, and notes how many layers are done."""

    n_done = 0

    def forward(
        self,
        runs: Sequence[Run],
        *,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
        activations: StageActivations | None = None,
    ) -> list[TokenResult | None]:
        assert before_layer is not None
        assert after_layer is not None
        for layer in range(N_LAYERS):
            before_layer(layer)
            self.n_done = layer + 1
            after_layer(layer)
        return [7] * len(runs)


def hand_on(
    head_dim: int, chunks: Sequence[tuple[int, int]]
) -> tuple[PrefillJob, LayerCounter, list[tuple[int, list[Piece]]]]:
    """Prefill a prompt in these chunks; return its writes, each after how many layers it came."""
    model = FakeModelSpec(layers=N_LAYERS, kv_heads=1, head_dim=head_dim)
    engine = LayerCounter(model)
    written: list[tuple[int, list[Piece]]] = []

    def submit(
        op: Op, pieces: Sequence[Piece], deadline_s: float = 0.0, *, verify: bool = False
    ) -> Transfer:
        assert (op, verify) == ("write", True)
        written.append((engine.n_done, list(pieces)))
        return FinishedTransfer(Report(sum(piece.length for piece in pieces), 0.0, ("shm",), 0))

    n_tokens = chunks[-1][1]
    pages = tuple(range(100, 100 + engine.layout.blocks_for(n_tokens)))
    start = StartPrefill(
        request_id=RequestId("a"),
        token_ids=(1,) * n_tokens,
        n_prompt=n_tokens,
        block_hashes=(),
        landing=Landing(Region("decode-0", 1, bytes(16), 1 << 30), pages, engine.layout),
        landing_expires_s=10.0,
        sampling=Sampling(),
        stopping=Stopping(max_new_tokens=10),
    )
    job = PrefillJob(start, PeerId(b"c"), 0.0, 10.0, pages=list(range(len(pages))))
    forward = PrefillForward(engine, submit, POOL, FakeClock())
    for begin, stop in chunks:
        forward([(job, PrefillChunk(RequestId("a"), begin, stop - begin, stop == n_tokens))])
    return job, engine, written


def covered(pieces: Sequence[Piece]) -> set[tuple[int, int]]:
    """Return the 32-byte rows read and written, as pairs of local and remote offsets."""
    rows = set()
    for piece in pieces:
        for shift in range(0, piece.length, 32):
            row = (piece.local_offset + shift, piece.remote_offset + shift)
            assert row not in rows, "each byte is written once"
            rows.add(row)
    return rows


def whole_blocks(engine: FakeEngine, n_blocks: int) -> set[tuple[int, int]]:
    size = engine.layout.block_bytes
    return {
        (block * size + shift, (100 + block) * size + shift)
        for block in range(n_blocks)
        for shift in range(0, size, 32)
    }


def test_few_bytes_go_in_one_transfer_after_the_last_layer() -> None:
    job, engine, written = hand_on(8, [(0, 40)])
    ((n_done, pieces),) = written
    assert n_done == N_LAYERS
    assert [piece.length for piece in pieces] == [engine.layout.block_bytes] * 3
    assert covered(pieces) == whole_blocks(engine, 3)
    assert len(job.landing_writes) == 1


def test_many_bytes_go_layer_by_layer_while_later_layers_compute() -> None:
    _, engine, written = hand_on(4096, [(0, 40)])
    assert [n_done for n_done, _ in written] == [1, 2, 3]
    assert covered([piece for _, pieces in written for piece in pieces]) == whole_blocks(engine, 3)


@pytest.mark.parametrize("head_dim", [8, 4096])
def test_each_pass_hands_on_the_blocks_that_it_completes(head_dim: int) -> None:
    job, engine, written = hand_on(head_dim, [(0, 20), (20, 30), (30, 40)])
    assert job.n_streamed == 3
    assert covered([piece for _, pieces in written for piece in pieces]) == whole_blocks(engine, 3)
