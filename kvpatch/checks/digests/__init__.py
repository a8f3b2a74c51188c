"""What P says of the bytes of a request, by which D proves what it has loaded."""
