"""Servers, a fault proxy and fixtures that several folders of tests share."""
