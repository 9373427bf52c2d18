"""What the scheduler would do on another device and under real traffic: the real one, under a virtual clock.

Everything that decides is the engine core's own code; only the device is simulated, by the time that it would take.
Same settings in, same report out. Rejected: a model of the scheduler, because it would drift from the scheduler.
"""
