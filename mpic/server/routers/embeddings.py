"""``/v1/embeddings``: vectors of texts, made by the embedder of the reference library."""

from __future__ import annotations

import base64

from fastapi import APIRouter, Request

from mpic.api.texts import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from mpic.errors import BadRequest, ContextLengthExceeded, ModelNotFound, UnsupportedParameter, cut
from mpic.server.auth import CurrentUser
from mpic.server.json_routes import JSONRoute
from mpic.server.state import State, StateDep

router = APIRouter(prefix="/v1/embeddings", tags=["embeddings"], route_class=JSONRoute)


@router.post("")
async def embed(
    body: EmbeddingRequest, request: Request, state: StateDep, user: CurrentUser
) -> EmbeddingList:
    """Make vectors of texts. They are those by which references are found."""
    return await state.pools.prompts.run(request, _embedded, body, state)


def _embedded(body: EmbeddingRequest, state: State) -> EmbeddingList:
    embedder, tokens = state.retriever.embedder, 0
    name = embedder.name.architecture
    if body.model != name:
        raise ModelNotFound(
            f"model {cut(body.model)!r} makes no vectors here; {cut(name)!r} does", param="model"
        )
    if body.dimensions not in (None, embedder.name.dimension):
        raise UnsupportedParameter(
            f"dimensions is not supported by this server: vectors have {embedder.name.dimension}",
            param="dimensions",
        )
    for i, text in enumerate(body.texts):
        param = "input" if isinstance(body.input, str) else f"input[{i}]"
        if not text.strip():
            raise BadRequest("a text to embed must not be empty", param=param)
        count, most = embedder.count(text)
        if count > most:
            raise ContextLengthExceeded(
                f"{param} is too long: the embedder reads {most} tokens", param=param, context_length=most
            )
        tokens += count
    data = []
    for i, row in enumerate(embedder.texts(body.texts)):
        packed = base64.b64encode(row.astype("<f4").tobytes()).decode()
        vector = packed if body.encoding_format == "base64" else tuple(map(float, row))
        data.append(Embedding(index=i, embedding=vector))
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return EmbeddingList(data=tuple(data), model=body.model, usage=usage)
