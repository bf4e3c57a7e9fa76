"""The reader of one record, where programs that prepare data import it; all readers are in `aspd_jax.sources`."""

from aspd_jax.sources import conversation

__all__ = ["conversation"]
