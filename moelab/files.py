"""What of `moelab.base.files` is for users: where the model that moelab ships is."""

from moelab.base.files import small_model

__all__ = ["small_model"]
