"""`LanguageModel` over several ranks: weights, projections and prefill's attention are divided among them.

The leading rank has all KV: it is given K, V and queries of every head, so that history, compression,
shipping and decode's attention are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.interface import DecodeAttention, LayerStates, PrefillObserver
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.parallel.lead import LeadingRank
from kvferry.shared.model.parallel.messages import Decode, Load, Prefill
from kvferry.shared.model.parallel.passes import RankDecodePass, RankPrefillPass
from kvferry.shared.model.parallel.ranks import backend_for
from kvferry.shared.model.parallel.support import whole_spec


class ParallelModel:
    """Implements `LanguageModel`; see there for the methods.

    Args:
        part: the leading rank's part of the model.
        lead: whose followers have loaded theirs.
    """

    def __init__(self, part: TransformersModel, lead: LeadingRank) -> None:
        self.spec = whole_spec(part.spec, lead.num_ranks)
        self.device = part.device
        self.dtype = part.dtype
        self._part = part
        self._lead = lead

    @property
    def num_ranks(self) -> int:
        return self._lead.num_ranks

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: Tensor,
        *,
        start: int,
        observer: PrefillObserver,
        states: LayerStates | None = None,
        num_queries: int | None = None,
        on_logits: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Raises: also WorkerUnavailable: a rank is lost."""
        self._part.check_window(start + len(token_ids))
        lead = self._lead
        current = RankPrefillPass(
            lead, self._part.spec, start=start, num_queries=num_queries, observer=observer
        )
        lead.command(
            Prefill(
                num_tokens=len(token_ids),
                start=start,
                num_queries=num_queries,
                with_logits=on_logits is not None,
            )
        )
        with lead.running(current):
            lead.broadcast(token_ids.contiguous())
            return self._part.run_prompt(token_ids, start, current, on_logits=on_logits)

    @torch.inference_mode()
    def decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        attention: DecodeAttention,
        states: LayerStates | None = None,
    ) -> Tensor:
        """Raises: also WorkerUnavailable: a rank is lost."""
        lead = self._lead
        current = RankDecodePass(lead, self._part.spec, attention)
        lead.command(Decode(batch_size=len(token_ids)))
        with lead.running(current):
            lead.broadcast(torch.stack([token_ids, positions]))
            return self._part.run_step(token_ids, positions, current)

    def pre_rope_keys(self, layer: int, keys: Tensor) -> Tensor:
        return self._part.pre_rope_keys(layer, keys)

    def close(self) -> None:
        """End the other ranks. No pass may be running."""
        self._lead.close()


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
) -> ParallelModel:
    """Start the ranks, of which this process is the first, and load a part of the model in each.

    Args:
        num_ranks: at least 2.
        on_lost: called once, by any thread, when a rank is lost. It should end the process.
        num_threads: CPU threads of all ranks together; 0: torch's default.
        others: as of `load_model`; `device` has no number.

    Raises: ConfigurationError, UnsupportedModel: as `load_model`, or the model cannot be divided so.
    """
    lead = LeadingRank(
        num_ranks,
        backend=backend_for(device, num_ranks),
        num_threads=max(1, (num_threads or torch.get_num_threads()) // num_ranks),
        on_lost=on_lost,
    )
    with ExitStack() as unless_loaded:
        unless_loaded.callback(lead.close)
        try:
            lead.join()
            lead.command(Load(path_or_id=path_or_id, device=device, dtype=dtype, max_model_len=max_model_len))
            part = load_model(
                path_or_id, name=name, device=device, dtype=dtype, max_model_len=max_model_len, ranks=lead
            )
        except RuntimeError as error:  # of an exchange with a rank that has ended
            raise ConfigurationError(lead.fail(error).message) from error
        model = ParallelModel(part, lead)
        unless_loaded.pop_all()
    return model
