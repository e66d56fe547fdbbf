"""Showing things: the plotly theme, the figures, the widgets. No technique lives here."""
