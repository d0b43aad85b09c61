"""Checks a request against its order when it arrives at the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpic.engine.vllm.wire import FIRST_SOFT, BadOrder, CompileOrder, LinkOrder, Order, mapped

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from mpic.engine.vllm.plugin.shared_chunks import SharedChunks


def check_request(request: Request, order: Order | None, soft: int) -> None:
    """Check that a request can follow its order.

    Args:
        soft: trained tokens that the workers' embedding layer knows.

    Raises:
        BadOrder: it cannot.
    """
    if request.prompt_token_ids is None or request.pooling_params is not None:
        raise BadOrder("an order needs a prompt of token ids and a request that generates tokens")
    if request.lora_request is not None or request.resumable:
        raise BadOrder("orders cannot be combined with LoRA adapters or streamed prompts")
    _check_ids(request, soft)
    if isinstance(order, CompileOrder):
        if request.max_tokens != 1:
            raise BadOrder("a request to compile ends with its prompt: max_tokens must be 1")
        return
    if not request.cache_salt:
        raise BadOrder("a link needs a cache_salt: its KV must not be taken for exact KV")
    if request.mm_features:
        raise BadOrder("a link's prompt is token ids alone; its images come from chunk files")
    if request.skip_reading_prefix_cache:
        raise BadOrder(
            "prompt log-probabilities are not known for a link: not all of its tokens are computed"
        )


def check_shared(
    request: Request, order: LinkOrder, chunks: SharedChunks | None, context: int, most_rows: int
) -> None:
    """Check that a request can map resident chunks. To vLLM its prompt is its own tokens alone, so anything that vLLM
    checks or counts over whole prompts is checked or refused here.

    Args:
        chunks: None where nothing is shared.
        context: maximum positions of the model.
        most_rows: maximum ranges that a link may map.

    Raises:
        BadOrder: it cannot.
    """
    if chunks is None:
        raise BadOrder("this engine shares no chunks: start it with the connector's setting sharing")
    if order.length + request.max_tokens > context:
        raise BadOrder(
            f"a prompt of {order.length} tokens and an answer of {request.max_tokens} are more than {context}"
        )
    params = request.sampling_params
    if params is not None and params.repetition_penalty != 1.0:
        raise BadOrder(
            "a repetition penalty counts the tokens of the whole prompt, which a shared link has not"
        )
    parts = list(mapped(order))
    if len(parts) > most_rows:
        raise BadOrder(f"a shared link maps {most_rows} ranges at most, not {len(parts)}: have it copied")
    names = {(order.chunks[number].key, order.chunks[number].length) for number, *_ in parts}
    blocks = sum(chunks.blocks(tokens) for _, tokens in names) + chunks.blocks(order.own + request.max_tokens)
    if blocks > chunks.room():
        raise BadOrder(f"the prompt and its chunks need {blocks} blocks, and the cache has {chunks.room()}")


def _check_ids(request: Request, soft: int) -> None:
    """Refuse trained tokens that the embedding layer does not know, and use of their ids that would index tables of
    the vocabulary.

    Only the request itself is looked at. In vLLM's V1 model runner a penalty in any request counts the prompt ids of
    the whole batch, and trained tokens would crash the engine: a client that sends packets must not send penalties at
    the same time.
    """
    highest = max(request.prompt_token_ids, default=0)
    if highest < FIRST_SOFT:
        return
    if highest >= FIRST_SOFT + soft:
        raise BadOrder(f"token {highest} is of an adapter, and the adapter here has {soft} tokens")
    params = request.sampling_params
    if params is not None and _uses_prompt_ids(params):
        raise BadOrder("penalties and prompt log-probabilities are not known for an adapter's tokens")


def _uses_prompt_ids(params: SamplingParams) -> bool:
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    return penalties != (0.0, 0.0, 1.0) or params.prompt_logprobs is not None
