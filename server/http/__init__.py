"""The HTTP application and the life of its process: routes, the door in front of them, connections, pages."""
