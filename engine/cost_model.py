"""CostModel: is it quicker to copy a KV block back, or to compute it again? Measured at start, refined while running.

Knows neither what is copied nor what is computed: only how fast. A disk that can't be measured counts as slow.
"""

from __future__ import annotations

from dataclasses import dataclass

EWMA = 0.1
"""Weight of the newest measurement."""
STEP_COPY_S = 0.005
"""Of every step so much time at most goes to blocks that are brought back: running streams keep their rhythm."""
DISK_LATENCY_S = 0.002
"""What a read costs beside its bytes: a file is opened, and the request waits for the step after."""
PREFILL_TOKENS_PER_ROW = 8
"""A step with so many tokens per row or more tells how fast prompts are computed; others mostly read the weights."""


@dataclass
class CostModel:
    """Speeds in bytes and tokens per second. `block_bytes` and `block_size` are those of one KV block."""

    block_bytes: int
    block_size: int
    copy_speed: float
    compute_speed: float
    disk_speed: float = 50e6

    @property
    def prefers_copy(self) -> bool:
        """Host memory gives a block sooner than the model."""
        return self._copy_s < self._compute_s

    @property
    def max_loads(self) -> int:
        """Blocks that a step may bring back."""
        return max(1, int(STEP_COPY_S / self._copy_s))

    def prefers_disk(self, num_blocks: int) -> bool:
        """The disk gives so many blocks sooner than the model."""
        return DISK_LATENCY_S + num_blocks * (self.block_bytes / self.disk_speed + self._copy_s) < (
            num_blocks * self._compute_s
        )

    def note_copy(self, num_bytes: int, seconds: float) -> None:
        """So many bytes went between device and host."""
        if seconds > 0:
            self.copy_speed += EWMA * (num_bytes / seconds - self.copy_speed)

    def note_disk(self, num_bytes: int, seconds: float) -> None:
        """So many bytes were read from the disk. Times are averaged, not speeds: one long read counts as long."""
        if seconds > 0:
            self.disk_speed = 1 / ((1 - EWMA) / self.disk_speed + EWMA * seconds / num_bytes)

    def note_step(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """A step has computed so many tokens; one that decodes says nothing about prompts."""
        if seconds > 0 and num_tokens >= PREFILL_TOKENS_PER_ROW * max(num_rows, 4):
            self.compute_speed += EWMA * (num_tokens / seconds - self.compute_speed)

    @property
    def _copy_s(self) -> float:
        return self.block_bytes / self.copy_speed

    @property
    def _compute_s(self) -> float:
        return self.block_size / self.compute_speed
