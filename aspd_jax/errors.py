"""Errors a user can cause, and can mend. The `aspd` command prints their message without a traceback."""


class AspdError(Exception):
    """Base of every error that says what was wrong, where, and what would be right."""


class StructureError(AspdError, ValueError):
    """A structured answer, or its linearisation, is not well formed."""


class TokenizerError(AspdError, ValueError):
    """A tokenizer cannot do what the token protocol needs of it."""


class CheckpointError(AspdError, ValueError):
    """A checkpoint folder is missing something, or holds something this project does not know."""


class ConfigError(AspdError, ValueError):
    """A configuration field has a value that cannot work."""


class DataError(AspdError, ValueError):
    """A record, or a file of them, cannot be used."""


class OutputError(AspdError, OSError):
    """A file or folder cannot be written: the disk is full, or the path does not allow it."""


class RequestError(AspdError, ValueError):
    """A decoding request breaks a limit of the engine."""


class ConversationError(DataError, RequestError):
    """A chat template cannot render a conversation: a fault of the record or the request that holds it."""
