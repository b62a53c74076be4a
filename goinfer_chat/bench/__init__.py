"""`goinfer-chat bench`: how fast a model runs here, beside what the machine can do and beside its peers."""
