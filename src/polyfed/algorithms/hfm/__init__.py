"""Silos: devices that hold different modalities of the same samples, and the template of training inside them."""

from polyfed.algorithms.hfm.alignment import check_aligned, devices_of_silos
from polyfed.algorithms.hfm.exchange import Exchange, bytes_down, bytes_up
from polyfed.algorithms.hfm.vertical import SiloState, Vertical

__all__ = ["Exchange", "SiloState", "Vertical", "bytes_down", "bytes_up", "check_aligned", "devices_of_silos"]
