"""The picture of a dump: whose slot is whose, what was found where, and in which order.

``chains`` finds out from the records alone which slot follows which, ``pool`` adds what the log and the engine's table say about slots,
``diagnosis`` takes the first finding apart, ``strips`` shows the requests around it, and ``incident`` puts everything together that a
picture shows. ``png`` and ``text`` draw it, and decide nothing.
"""
