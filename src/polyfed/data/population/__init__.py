"""How the rows of a table are spread over clients."""
