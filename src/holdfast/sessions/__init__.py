"""One MQTT client's state: subscriptions, what is under way to it, and how far it has come."""
