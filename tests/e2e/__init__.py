"""End to end: a real `holdfast serve` process, and MQTT clients nobody here wrote."""
