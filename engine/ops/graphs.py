"""GraphReplay: decode steps as CUDA graphs, one for each bucket of batch sizes: all launches of all layers in one call.

A graph reads and writes the memory that it was captured with. So a step's inputs are copied into tensors that stay
where they are, and rows up to the bucket's size are padding that sees and writes nothing. What may differ under one
graph: contexts, block tables, which adapters meet which rows. Knows no kernel and no model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from engine.ops.device_rows import FixedRows

if TYPE_CHECKING:
    from engine.ops.cuda import CudaPlan

Body = Callable[..., tuple[Tensor, ...]]
"""body(*inputs, plan): runs all layers."""

Recorder = Callable[[Callable[[], tuple[Tensor, ...]]], Callable[[], tuple[Tensor, ...]]]
"""Takes what launches kernels on memory that stays, gives what launches them again."""

MAX_ROWS = 512
"""Larger decode steps compute for longer than their launches take."""

MAX_GRAPHS = 96
MIN_RANK = 256
MIN_TABLE_WIDTH = 256
"""Rank and blocks that a graph has room for, at least: above them, powers of two, each a graph of its own. Room costs a
little memory: kernels touch what is there."""


class Bucket(NamedTuple):
    """What a graph was captured for. num_segments 0: it launches nothing for adapters."""

    num_rows: int
    num_segments: int
    table_width: int
    max_rank: int


def bucket_size(num_rows: int) -> int:
    """The smallest batch size with a graph that holds these rows: 1, 2, 4, then steps of 8, 16 and 32."""
    if num_rows <= 4:
        return 1 << (num_rows - 1).bit_length()
    step = 8 if num_rows <= 64 else 16 if num_rows <= 256 else 32
    return -(-num_rows // step) * step


def decode_sizes(max_rows: int) -> list[int]:
    """Numbers of rows, one for each graph that decode steps of up to so many rows use."""
    return sorted({min(bucket_size(rows), max_rows) for rows in range(1, min(max_rows, MAX_ROWS) + 1)})


class Graph:
    """A recorded step and the memory that it reads: the model's inputs [T, …], slots [T] among them, and the rows."""

    def __init__(
        self, bucket: Bucket, inputs: tuple[Tensor, ...], record: Recorder, body: Body, plan: CudaPlan
    ) -> None:
        device = inputs[0].device
        self._inputs = tuple(each.new_zeros((bucket.num_rows, *each.shape[1:])) for each in inputs)
        self._fixed = FixedRows(bucket.num_rows, bucket.num_segments, bucket.table_width, bucket.max_rank, device)
        self.take(inputs, plan)
        self.run = record(lambda: body(*self._inputs, plan.fixed(self._fixed.rows)))

    def take(self, inputs: tuple[Tensor, ...], plan: CudaPlan) -> None:
        """Copies a step's inputs to where the graph reads them."""
        self._fixed.take(plan.batch)
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept[: len(given)].copy_(given)
            if given.dtype == torch.int64:  # slots: padding writes nowhere
                kept[len(given) :].fill_(-1)


class GraphReplay:
    """See engine.ops.Replay. For the layers of one model on one KV cache."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._graphs: OrderedDict[Bucket, Graph] = OrderedDict()

    def __call__(self, body: Body, inputs: tuple[Tensor, ...], plan: CudaPlan) -> tuple[Tensor, ...]:
        """body(*inputs, plan). The outputs are good until the next call."""
        num_rows = plan.num_tokens
        if num_rows > MAX_ROWS or num_rows != plan.batch.num_rows:  # a chunk of a prompt
            return body(*inputs, plan)
        bucket = bucket_of(plan)
        graph = self._graphs.get(bucket)
        if graph is None:
            graph = self._graphs[bucket] = Graph(bucket, inputs, self._record, body, plan)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(bucket)
        graph.take(inputs, plan)  # also after recording, which ran the body: it may have changed its inputs
        return tuple(output[:num_rows] for output in graph.run())


def bucket_of(plan: CudaPlan) -> Bucket:
    batch = plan.batch
    size = bucket_size(batch.num_rows)
    width = max(MIN_TABLE_WIDTH, 1 << (batch.tables_SB.shape[1] - 1).bit_length())
    if not batch.segments:
        return Bucket(size, 0, width, 0)
    assert batch.bank is not None
    rank = max(batch.bank.placed(segment.slot).rank for segment in batch.segments)
    return Bucket(size, size, width, max(MIN_RANK, 1 << (rank - 1).bit_length()))


class CudaGraphs:
    """The Recorder of a card. Its graphs share what they need between two launches: they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, launch: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        """Runs it once, so that all kernels are compiled and libraries have their memory, then captures it."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = launch()
        self._pool = graph.pool()

        def run() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return run
