"""One round over one partition."""
