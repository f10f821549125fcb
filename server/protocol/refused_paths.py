"""Paths that OpenAI and other servers have and this one has not, and what to use instead.

Not fields (server/protocol/field_table.py) and not the answers (server/http/refused_routes.py). No units.
"""

from __future__ import annotations

_VECTORS = "this server generates text and makes no vectors or scores; ask a server of an embedding model"
_MEDIA = "this server reads and writes text alone"
# Path -> what to do instead.
REFUSED = {
    "/v1/embeddings": _VECTORS,
    "/v1/rerank": _VECTORS,
    "/rerank": _VECTORS,
    "/v1/score": _VECTORS,
    "/score": _VECTORS,
    "/pooling": _VECTORS,
    "/classify": _VECTORS,
    "/v1/moderations": _VECTORS,
    "/v1/responses": "use /v1/chat/completions",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/edits": "use /v1/completions",
    "/v1/batches": "use the command moewe run-batch, which reads files of the same format",
    "/v1/files": "use the command moewe run-batch, which reads files of the same format",
    "/v1/fine_tuning/jobs": "this server trains nothing",
    "/v1/audio/speech": _MEDIA,
    "/v1/audio/transcriptions": _MEDIA,
    "/v1/audio/translations": _MEDIA,
    "/v1/images/generations": _MEDIA,
    "/v1/images/edits": _MEDIA,
    "/v1/images/variations": _MEDIA,
    "/v1/load_lora_adapter": "adapters are not supported",
    "/v1/unload_lora_adapter": "adapters are not supported",
}
