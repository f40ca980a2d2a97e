"""`LanguageModel` over several ranks: weights, projections and attention are divided among them by KV heads.

Each rank compresses and ships its own heads of a prompt, where the method compresses them apart. Otherwise,
and for history, the leading rank gives the observer K and V of every head. In decode each rank has the KV of
its own heads, and attends to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvferry.kernels.dispatch import KernelMode
from kvferry.shared.device.kernel_paths import Role
from kvferry.shared.errors import ConfigurationError, UnsupportedModel, WorkerUnavailable
from kvferry.shared.model.bridge import DecodePass, PrefillPass, TransformersModel
from kvferry.shared.model.interface import DecodeAttention, DividingObserver, PrefillObserver
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.parallel.lead import FOLLOWER, LeadingRank
from kvferry.shared.model.parallel.passes import RankDecodePass, RankPrefillPass
from kvferry.shared.model.parallel.ranks import backend_for
from kvferry.shared.model.spec import ModelSpec

_PREPARE_TIMEOUT_S = 900.0
"""How long compiling and testing kernels may take."""


class ParallelModel(TransformersModel):
    """The leading rank's part, whose passes all ranks run; they also raise WorkerUnavailable: a rank is lost.

    Attributes:
        part_spec: the spec of the leading rank's heads, equal for every rank.
        lead: as given.

    Args:
        part: the leading rank's part of the model.
        lead: whose followers have loaded theirs.
    """

    def __init__(self, part: TransformersModel, lead: LeadingRank) -> None:
        vars(self).update(vars(part))  # over the same modules
        self.spec = _whole_spec(part.spec, lead.num_ranks)
        self.part_spec = part.spec
        self.num_ranks = lead.num_ranks
        self.lead = lead
        self._fused = None

    @contextmanager
    def _prompt_pass(
        self,
        token_ids: Tensor,
        start: int,
        observer: PrefillObserver,
        num_queries: int | None,
        with_logits: bool,
    ) -> Iterator[PrefillPass]:
        division = observer.division if isinstance(observer, DividingObserver) else None
        current = RankPrefillPass(
            self.lead,
            self,
            self.part_spec,
            start=start,
            num_queries=num_queries,
            division=division,
            observer=observer,
        )
        self.lead.call("run_prompt", len(token_ids), start, num_queries, with_logits, division)
        with self.lead.running(current):
            self.lead.broadcast(token_ids.contiguous())
            yield current

    @contextmanager
    def _step_pass(
        self, token_ids: Tensor, positions: Tensor, attention: DecodeAttention
    ) -> Iterator[DecodePass]:
        """Make the context of a step. Args: attention: of the leading rank's heads; followers have theirs
        (`FollowingRank`)."""
        current = RankDecodePass(attention, spec=self.part_spec)
        self.lead.call("run_step", len(token_ids))
        with self.lead.running(current):
            self.lead.broadcast(torch.stack([token_ids, positions]))
            yield current
        if current.error is not None:
            raise current.error

    def prepare(
        self, role: Role, *, kernels: KernelMode, self_test: bool, epsilon_tables: str, calibration: str
    ) -> None:
        """Have the other ranks set up what this process has set up, and wait until they have. See
        `FollowingRank.prepare`."""
        prepared = self.lead.ask("prepare", role, kernels, self_test, epsilon_tables, calibration)
        prepared(timeout_s=_PREPARE_TIMEOUT_S)

    def close(self) -> None:
        """End the other ranks. No pass may be running."""
        self.lead.close()


def _whole_spec(spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """Return the spec of all heads.

    Args: spec: as the probe has measured it in one rank.
    Raises: UnsupportedModel: a layer cannot be divided.
    """
    for layer in range(spec.num_layers):
        own = spec.layer(layer)
        if not own.has_rows or own.latent_dim or own.heads is not None:
            raise UnsupportedModel(
                f"layer {layer} has a state, latent rows or heads of its own, which is not supported with "
                f"tensor_parallel {num_ranks}; it must be 1"
            )
    return replace(spec, num_heads=spec.num_heads * num_ranks, num_kv_heads=spec.num_kv_heads * num_ranks)


def load_parallel_model(
    path_or_id: str | Path,
    *,
    num_ranks: int,
    on_lost: Callable[[Exception], None],
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    max_model_len: int = 0,
    num_threads: int = 0,
    follower_class: str = FOLLOWER,
) -> ParallelModel:
    """Start the ranks, of which this process is the first, and load a part of the model in each.

    Args:
        num_ranks: at least 2.
        on_lost: called once, by any thread, when a rank is lost. It should end the process.
        num_threads: CPU threads of all ranks together; 0: torch's default.
        follower_class: as of `LeadingRank`.
        others: as of `load_model`; `device` has no number.

    Raises: ConfigurationError, UnsupportedModel: as `load_model`, or the model cannot be divided so.
    """
    lead = LeadingRank(
        num_ranks,
        backend=backend_for(device, num_ranks),
        num_threads=max(1, (num_threads or torch.get_num_threads()) // num_ranks),
        on_lost=on_lost,
        follower_class=follower_class,
    )
    with ExitStack() as unless_loaded:
        unless_loaded.callback(lead.close)
        try:
            lead.join()
            lead.call("load", path_or_id, device, dtype, max_model_len)
            part = load_model(
                path_or_id, name=name, device=device, dtype=dtype, max_model_len=max_model_len, ranks=lead
            )
        except (RuntimeError, WorkerUnavailable) as error:  # from an exchange with a rank that has ended
            raise ConfigurationError(lead.fail(error).message) from error
        model = ParallelModel(part, lead)
        unless_loaded.pop_all()
    return model
