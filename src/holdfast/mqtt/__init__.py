"""The MQTT wire: bytes to packets and back, and which filters a topic meets. No sockets, no clock."""
