"""ASGI middleware, one module each; `app.create_app` adds them in order."""
