"""Errors that a user can cause and correct, and a check that raises one.

The `aspd` command prints their message without a traceback.
"""


class AspdError(Exception):
    """Base class; the message says what was wrong, where, and what was expected."""


class StructureError(AspdError, ValueError):
    """A structured answer or its linearisation is not well formed."""


class TokenizerError(AspdError, ValueError):
    """A tokenizer does not meet the requirements of the token protocol."""


class CheckpointError(AspdError, ValueError):
    """A checkpoint lacks something, or contains something that is not supported."""


class ConfigError(AspdError, ValueError):
    """A configuration field has an invalid value."""


class DataError(AspdError, ValueError):
    """A record or a file of records cannot be used."""


class OutputError(AspdError, OSError):
    """A file or folder cannot be written: the disk is full, or the path does not allow it."""


class RequestError(AspdError, ValueError):
    """A request exceeds a limit of the engine, or an endpoint refuses it."""


class ConversationError(DataError, RequestError):
    """A chat template cannot render a conversation, because the record or request that holds it is not valid."""


def check_unicode(text: str, where: str) -> None:
    """Check that the text of a record or request can be encoded as UTF-8.

    Raises:
        ConversationError: the text contains an unpaired surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConversationError(f"{where}: expected Unicode text, got an unpaired surrogate") from None
