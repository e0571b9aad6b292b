"""Mathematics with a signature.  Bodies here are the reference backend; other backends are folders beside them."""
