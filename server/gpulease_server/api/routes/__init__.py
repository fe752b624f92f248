"""The routes, one module for each noun; `app.create_app` collects them."""
