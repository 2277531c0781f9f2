"""Models that take turns on one device, in virtual time: policies compared on a day's arrivals."""
