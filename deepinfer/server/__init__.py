"""The HTTP server: the only place that knows text.  Nothing below it imports it."""
