"""The exceptions that users catch: one base class, each also a built-in exception of the right kind."""


class HfXaiError(Exception):
    """Base class of every error that hf_xai raises on purpose."""


class ConfigError(HfXaiError, ValueError):
    """A setting has a value that it can't have, or settings contradict each other."""


class ArtifactMismatchError(HfXaiError, ValueError):
    """A saved config or artefact does not fit the model or data that it is used with."""


class DataError(HfXaiError, ValueError):
    """Data, prompts or samples are missing, empty or of the wrong shape."""


class SubjectNotFoundError(DataError):
    """The subject of an edit request can't be located in its prompt for certain."""


class ConflictingEditsError(DataError):
    """Two edit requests want different answers to the same prompt."""


class TokenizerError(HfXaiError, TypeError):
    """The tokenizer can't say which characters a token stands for."""


class EditCollapseWarning(UserWarning):
    """A sequence of edits is destroying the model, so that no further edit was made."""


class HubError(HfXaiError, OSError):
    """The Hub can't be reached, or answers with an error that is not the caller's."""


class UnsupportedModelError(HfXaiError, TypeError):
    """The object is not one that the method can work on."""


class AlreadyEnabledError(HfXaiError, ValueError):
    """The method, or another that takes the same place, is already on this object."""


class NotEnabledError(HfXaiError, RuntimeError):
    """The method was asked about, or taken away, where it is not enabled."""


class MissingDependencyError(HfXaiError, ImportError):
    """An optional dependency is missing; the message carries the pip line that installs it."""
