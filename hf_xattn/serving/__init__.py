"""A model that answers others: chat sessions, the HTTP server, the page.

What may come in: what runs for a long time and talks to a client.
Imports from: all rooms above, and the model.
"""
