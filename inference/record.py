"""From what a step returned to what is kept of it: ids, log-probs, versions, and why a sequence ended. Host side."""

import jax
import numpy as np

from inference.routing import Routes
from inference.sequence import Sequence
from inference.text import Detokenizer, StopStrings, TokenizerLike
from inference.types import MAX_TOP_LOGPROBS, Completion, FinishReason, PromptLogprobs, Tokens
from models.config import ModelConfig
from models.routes import not_recorded


def prepare(sequence: Sequence, tokenizer: TokenizerLike | None) -> None:
    """Makes room for what the request wants recorded besides its tokens."""
    params, n = sequence.request.params, len(sequence.request.prompt_ids)
    if params.stop and tokenizer is not None:
        sequence.text = Detokenizer(tokenizer), StopStrings(params.stop)
    if params.prompt_logprobs:
        sequence.prompt_logprobs = PromptLogprobs(
            logprobs=np.full(n, np.nan, np.float32),
            top_ids=np.zeros((n, params.top_logprobs), np.int32),
            top_logprobs=np.zeros((n, params.top_logprobs), np.float32),
        )


def record(sequence: Sequence, packed: np.ndarray, version: int, max_context: int) -> tuple[int, FinishReason | None]:
    """Appends what a row sampled, up to its end; what the device sampled after that is dropped.

    Args:
        packed: int32 [steps, PACKED], as the runner packs it.

    Returns:
        How many tokens were recorded, and why the sequence is over, if it is.
    """
    sequence.pending -= len(packed)
    k, start, reason = sequence.request.params.top_logprobs, len(sequence.ids), None
    logprobs = packed[:, 1:3].view(np.float32)
    for token, (drawn, full), tops in zip(packed[:, 0].tolist(), logprobs.tolist(), packed[:, 3:], strict=True):
        sequence.ids.append(token)
        sequence.logprobs.append(drawn)
        sequence.logprobs_full.append(full)
        sequence.versions.append(version)
        if k:
            sequence.top.append((tops[:k].copy(), tops[MAX_TOP_LOGPROBS : MAX_TOP_LOGPROBS + k].view(np.float32).copy()))
        if reason := _ends(sequence, token, max_context):
            break
    return len(sequence.ids) - start, reason


def _ends(sequence: Sequence, token: int, max_context: int) -> FinishReason | None:
    """Whether the newest token is a sequence's last, and why."""
    params = sequence.request.params
    if token in params.stop_ids and not params.ignore_eos:
        sequence.stop_reason = token
        return FinishReason.STOP
    if sequence.text is not None:
        text, stops = sequence.text
        _, sequence.stop_reason = stops.add(text.add([token]))
        if sequence.stop_reason is not None:
            return FinishReason.STOP
    num_sampled = len(sequence.ids) - len(sequence.request.prompt_ids)
    return FinishReason.LENGTH if num_sampled == params.max_tokens or len(sequence.ids) == max_context else None


def record_prompt(prompt: PromptLogprobs, out: tuple[jax.Array, ...], places: slice, first: int) -> None:
    """Keeps the log-probs of the prompt tokens that follow those at flat `places`, which are tokens `first` and on."""
    n = min(places.stop - places.start, len(prompt.logprobs) - first - 1)
    if n <= 0:
        return
    here, k = slice(places.start, places.start + n), prompt.top_ids.shape[1]
    there = slice(first + 1, first + 1 + n)
    prompt.logprobs[there] = np.asarray(out[0])[here]
    if k:
        prompt.top_ids[there], prompt.top_logprobs[there] = np.asarray(out[1])[here, :k], np.asarray(out[2])[here, :k]


def tokens_of(sequence: Sequence, first: int) -> Tokens:
    """What was recorded of the sampled tokens from the `first` on."""
    n, k = len(sequence.versions) - first, sequence.request.params.top_logprobs
    top = sequence.top[first:]
    return Tokens(
        ids=np.asarray(sequence.ids[len(sequence.request.prompt_ids) + first :], np.int32),
        logprobs=np.asarray(sequence.logprobs[first:], np.float32),
        logprobs_full=np.asarray(sequence.logprobs_full[first:], np.float32),
        versions=np.asarray(sequence.versions[first:], np.int32),
        top_ids=np.asarray([ids for ids, _ in top], np.int32).reshape(n, k),
        top_logprobs=np.asarray([logprobs for _, logprobs in top], np.float32).reshape(n, k),
    )


def routing_of(sequence: Sequence, model: ModelConfig) -> np.ndarray:
    """What the request did not give: a row of each token but the last. Those of tokens that a cancel left uncomputed say "not
    recorded"."""
    rows = not_recorded(len(sequence.ids) - 1, model)
    if sequence.known is not None:
        rows[: len(sequence.known)] = sequence.known
    return rows[sequence.given :].copy()  # a view would keep the rows of the whole path


def completion_of(sequence: Sequence, reason: FinishReason, routes: Routes | None) -> Completion:
    """The whole record of a finished sequence."""
    return Completion(
        **vars(tokens_of(sequence, 0)),
        request_id=sequence.request.id,
        prompt_ids=sequence.request.prompt_ids,
        finish_reason=reason,
        stop_reason=sequence.stop_reason,
        cached_tokens=sequence.cached or 0,
        prefilled_tokens=sequence.prefilled,
        prompt_logprobs=sequence.prompt_logprobs,
        routing=routing_of(sequence, routes.model) if routes is not None else None,
        routing_start=sequence.given,
    )
