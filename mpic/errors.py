"""The error tree. Every error has a stable ``code`` and one HTTP status.

`make docs` draws the tree with all codes. Its leaves ``ConfigError`` (`mpic.config_values`) and ``KeyNotFound``
(`mpic.keys`) are defined where they are raised. ``LibraryInUse``, ``ForeignFolder``, ``AdapterRefused`` and
``ModelRefused`` keep a server from starting, and ``CorruptFile`` makes it compile a chunk again, so none of these comes
over HTTP.
"""

from __future__ import annotations

from typing import Any

QUOTED = 128
"""Most characters of a text of a client that anything said about it repeats. Ids of references have as many."""
MESSAGE, FACT = 2000, 512
"""Most characters of a message, and of each other text in the body of an error."""


def cut(text: str, most: int = QUOTED) -> str:
    """Return a text, or its beginning and an ellipsis if it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}…"


class MPICError(Exception):
    """Base of all errors that this system raises on purpose.

    Args:
        message: a sentence for the person who made the request: what happened and what to do about it.
        param: the request field at fault, as OpenAI names it, or None.
        **details: facts for programs (numbers, ids) that JSON can hold.
    """

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, **details: Any) -> None:
        self.message = cut(message, MESSAGE)
        super().__init__(self.message)
        self.param = param and cut(param, FACT)
        self.details = {k: cut(v, FACT) if isinstance(v, str) else v for k, v in details.items()}

    def body(self) -> dict[str, Any]:
        """Return the error body in OpenAI's shape: ``{"error": {message, type, param, code, details}}``."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        if self.details:
            error["details"] = self.details
        return {"error": error}


class BadRequest(MPICError):
    status, code = 400, "bad_request"


class EmptyPrompt(BadRequest):
    code = "empty_prompt"


class EmptyQuery(BadRequest):
    code = "empty_query"


class UnknownPolicy(BadRequest):
    code = "unknown_policy"


class UnknownPress(BadRequest):
    code = "unknown_press"


class UnsupportedParameter(BadRequest):
    code = "unsupported_parameter"


class InvalidGrammar(BadRequest):
    """The form that the request asks of the answer (a schema, a regular expression) is not one that can be followed."""

    code = "invalid_grammar"


class GrammarTooComplex(InvalidGrammar):
    """Following the form would take more work than a request may cause."""

    code = "grammar_too_complex"


class LaboratoryMissing(BadRequest):
    """The command belongs to the laboratory, which is not installed; the message says how to install it."""

    code = "laboratory_missing"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class DocumentTooLong(ContextLengthExceeded):
    """The file is too long for any prompt to link all of it."""

    code = "document_too_long"


class PoolTooSmall(BadRequest):
    code = "pool_too_small"


class InvalidUpload(BadRequest):
    code = "invalid_upload"


class InvalidImage(InvalidUpload):
    code = "invalid_image"


class AnimatedImage(InvalidImage):
    code = "animated_image"


class InvalidVideo(InvalidUpload):
    code = "invalid_video"


class UnsupportedType(InvalidUpload):
    """The type of the upload is known but not accepted; the message names it."""

    code = "unsupported_type"


class NoImageDecoder(UnsupportedType):
    """The package that decodes such images is not installed; the message names the command that installs it."""

    code = "no_image_decoder"


class NoVideoDecoder(UnsupportedType):
    """The package that decodes such videos is not installed; the message names the command that installs it."""

    code = "no_video_decoder"


class InvalidDocument(InvalidUpload):
    code = "invalid_document"


class NoText(InvalidDocument):
    """There is no text in the document: its pages are pictures."""

    code = "no_text"


class NoDocumentReader(UnsupportedType):
    """The packages that read such documents are not installed; the message names the command that installs them."""

    code = "no_document_reader"


class InvalidText(InvalidUpload):
    code = "invalid_text"


class EmptyUpload(InvalidText):
    code = "empty_upload"


class UploadIncomplete(BadRequest):
    """The parts of an upload do not have as many bytes together as it was to have."""

    code = "upload_incomplete"


class ChecksumMismatch(BadRequest):
    """The bytes that arrived are not those that were sent."""

    code = "checksum_mismatch"


class UnsupportedModality(BadRequest):
    code = "unsupported_modality"


class MethodNotAllowed(BadRequest):
    """The route exists, the method does not."""

    status, code = 405, "method_not_allowed"


class InvalidHTTP(BadRequest):
    """The bytes are not an HTTP request, or one whose form costs more than its content."""

    code = "invalid_http"


class Unauthorized(MPICError):
    status, code = 401, "unauthorized"


class Forbidden(MPICError):
    status, code = 403, "forbidden"


class KeysNeeded(Forbidden):
    """The request came through a proxy, and the server has no keys to tell who sent it."""

    code = "keys_needed"


class StorageQuotaExceeded(Forbidden):
    code = "storage_quota_exceeded"


class NotFound(MPICError):
    status, code = 404, "not_found"


class FileNotFound(NotFound):
    code = "file_not_found"


class UploadNotFound(NotFound):
    """There is no such upload in parts: it never was, or ended long ago, or the server was started since."""

    code = "upload_not_found"


class CacheNotFound(NotFound):
    code = "cache_not_found"


class ResponseNotFound(NotFound):
    """No such response is kept (``previous_response_id``)."""

    code = "response_not_found"


class UnknownHandle(NotFound):
    code = "unknown_handle"


class NoPages(UnknownHandle):
    """A prompt names a page of a file that has no pages."""

    code = "no_pages"


class PageNotFound(UnknownHandle):
    """A prompt names a page that the document does not have."""

    code = "page_not_found"


class ReferenceNotFound(NotFound):
    code = "reference_not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Conflict(MPICError):
    status, code = 409, "conflict"


class HandleTaken(Conflict):
    code = "handle_taken"


class UploadEnded(Conflict):
    """The upload in parts is complete, or being completed, or was cancelled, or has expired."""

    code = "upload_ended"


class ReferenceExists(Conflict):
    code = "reference_exists"


class EmbedderMismatch(Conflict):
    code = "embedder_mismatch"


class RequestTimeout(MPICError):
    """The client took longer to send its request than the server waits."""

    status, code = 408, "request_timeout"


class PreconditionFailed(MPICError):
    """The content is not the one that the client asks for (``If-Match``)."""

    status, code = 412, "precondition_failed"


class TooLarge(MPICError):
    status, code = 413, "too_large"


class ImageTooLarge(TooLarge):
    """The image has more pixels than are accepted."""

    code = "image_too_large"


class ImageTooCostly(TooLarge):
    """The image takes far more time or memory to decode than its size explains."""

    code = "image_too_costly"


class DocumentTooCostly(TooLarge):
    """The document takes far more time or memory to read than its size explains."""

    code = "document_too_costly"


class TooManyPages(TooLarge):
    """The document has more pages than are accepted."""

    code = "too_many_pages"


class VideoTooLarge(TooLarge):
    """The clip is longer, or its frames have more pixels, than is accepted."""

    code = "video_too_large"


class VideoTooCostly(TooLarge):
    """The clip takes far more time or memory to decode than its size explains."""

    code = "video_too_costly"


class RangeNotSatisfiable(MPICError):
    """The range of a download begins behind the end of the file."""

    status, code = 416, "range_not_satisfiable"


class HeadersTooLarge(MPICError):
    status, code = 431, "headers_too_large"


class RateLimited(MPICError):
    """The request is refused because of others under way or before it.

    Args:
        retry_after: seconds after which to try again.
    """

    status, code = 429, "rate_limited"

    def __init__(
        self, message: str, *, retry_after: float = 1.0, param: str | None = None, **details: Any
    ) -> None:
        super().__init__(message, param=param, **details)
        self.retry_after = retry_after


class QueueFull(RateLimited):
    code = "queue_full"


class DecoderBusy(RateLimited):
    """Too many large images are waiting to be decoded."""

    code = "decoder_busy"


class TooManyBytes(RateLimited):
    """The bodies of the requests under way take as much memory, or the user's uploads under way as much of the disk, as
    they may together."""

    code = "too_many_bytes"


class TooManyUploads(RateLimited):
    """The user has as many uploads in parts under way, or the upload has as many parts, as are allowed."""

    code = "too_many_uploads"


class TooManyAtOnce(RateLimited):
    """The key has as many requests under way as its limit allows."""

    code = "too_many_concurrent"


class CompileFailed(MPICError):
    code = "compile_failed"


class DeletedMeanwhile(CompileFailed):
    """The content was deleted after its compiling had been asked for. Another file that holds it can ask again."""

    code = "deleted_meanwhile"


class EmbeddingFailed(MPICError):
    """The embedder works, but cannot make a vector of this image or text."""

    code = "embedding_failed"


class StorageFull(MPICError):
    status, code = 507, "storage_full"


class Unavailable(MPICError):
    """The server cannot do this now. ``retry_after``: seconds after which to try again, or None if unknown."""

    status, code = 503, "unavailable"
    retry_after: float | None = None


class EmbedderUnavailable(Unavailable):
    code = "embedder_unavailable"


class OutOfMemory(Unavailable):
    """The server does not have enough memory for the request now; it may have later."""

    code = "out_of_memory"
    retry_after = 5.0


class TooManyConnections(Unavailable):
    """The server, or the client's address, has as many open connections as allowed."""

    code = "too_many_connections"


class EngineStopped(Unavailable):
    code = "engine_stopped"


class DatabaseBusy(Unavailable):
    """Another process keeps the catalogue or the key store locked; nothing was changed."""

    code = "database_busy"
    retry_after = 2.0


class DatabaseFailed(Unavailable):
    """The catalogue or the key store cannot be read or written: an I/O error, a read-only disk, no permission."""

    code = "database_failed"
    retry_after = 5.0


class StorageFailed(Unavailable):
    """A file cannot be read from the disk, or became shorter while it was read. Its content is not to blame."""

    code = "storage_failed"
    retry_after = 5.0


class LibraryGone(Unavailable):
    """The library's folder was removed or replaced while a server has it open; nothing is stored any more."""

    code = "library_gone"
    retry_after = 5.0


class LibraryInUse(Unavailable):
    """Another process has the library open."""

    code = "library_in_use"


class ForeignFolder(Unavailable):
    """The folder is not a library's, and holds other files under names that a library uses."""

    code = "foreign_folder"


class LinkedFolder(Unavailable):
    """A symbolic link stands where a library has a folder or an original of its own."""

    code = "linked_folder"


class CorruptFile(MPICError):
    code = "corrupt_file"


class IntegrityError(MPICError):
    code = "integrity_error"


class DatabaseDamaged(IntegrityError):
    """The catalogue or the key store is missing, truncated, or not a database any more."""

    code = "database_damaged"


class NoAdapter(BadRequest):
    """The policy needs a trained adapter, and the model has none."""

    code = "no_adapter"


class AdapterRefused(MPICError):
    """A file of trained tokens cannot be used with the model."""

    code = "adapter_refused"


class ModelRefused(MPICError):
    code = "model_refused"
