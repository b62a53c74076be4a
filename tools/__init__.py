"""Tools a model may call. Imports neither `engine` nor `goinfer_chat`."""
