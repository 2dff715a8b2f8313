"""Parts that strategies are made of. A file here is no strategy."""
