"""A small corpus with labels for the examples: the handbook of a shop, and questions about it.

``search`` is a real engine that knows nothing of ctxguard: full-text search by SQLite's FTS5.
"""

import re
import sqlite3

PASSAGES = {
    "returns": "Unused goods can be returned within 30 days of delivery. We pay the postage.",
    "returns-sale": "Goods from the sale can be exchanged within 14 days, but not returned.",
    "returns-food": "Food and drink cannot be returned once the seal is broken.",
    "refund": "A refund is paid to the card that the order was paid with, within 5 working days.",
    "refund-gift": "Refunds of gift orders are paid as a voucher to the person who received them.",
    "delivery": "Standard delivery takes 3 to 5 working days and costs 4 euros.",
    "delivery-express": "Express delivery arrives on the next working day and costs 12 euros.",
    "delivery-island": "Delivery to islands takes up to 10 working days; express is not offered.",
    "delivery-free": "Standard delivery is free for orders above 60 euros.",
    "pickup": "Orders can be picked up in the shop two hours after they were placed.",
    "hours": "The shop is open from 9 to 18 on weekdays and from 10 to 16 on Saturdays.",
    "hours-holiday": "The shop is closed on public holidays and on the last day of the year.",
    "warranty": "Machines have a warranty of 24 months from the day of purchase.",
    "warranty-parts": "Wearing parts such as seals and filters have a warranty of 6 months.",
    "warranty-claim": "For a warranty claim send the receipt and a photo of the fault by e-mail.",
    "clean": "Clean the brewing unit every week under running water, without detergent.",
    "descale": "Descale the machine every three months with two tablets of descaler.",
    "descale-hard": "Where the water is hard, descale the machine every month.",
    "filter": "Change the water filter after 50 litres or two months, whichever is first.",
    "grind": "Turn the ring on the mill to the left for a finer grind. Do so while it runs.",
    "milk": "Froth milk at 60 degrees. Rinse the milk hose after every use.",
    "error-1": "Error E1 says that the water tank is empty or not seated properly.",
    "error-2": "Error E2 says that the brewing unit is missing. Push it in until it clicks.",
    "error-3": "Error E3 says that the machine is too hot. Switch it off for half an hour.",
    "voucher": "A voucher is valid for three years and can be used in several purchases.",
    "voucher-lost": "A lost voucher is replaced if you can show the receipt of its purchase.",
    "price": "If you find the machine cheaper elsewhere within 14 days we pay the difference.",
    "account": "Change your address in your account before the order leaves the shop.",
    "cancel": "An order can be cancelled free of charge until it leaves the shop.",
    "invoice": "The invoice comes by e-mail on the day that the order leaves the shop.",
}

QUESTIONS = {
    "how many days do I have to return goods": ["returns"],
    "can I return goods from the sale": ["returns-sale"],
    "can I return food that I have opened": ["returns-food"],
    "when is the refund paid to my card": ["refund"],
    "refund of a gift order": ["refund-gift"],
    "how long does standard delivery take": ["delivery"],
    "next day express delivery cost": ["delivery-express"],
    "delivery to islands": ["delivery-island"],
    "when is delivery free": ["delivery-free"],
    "pick up my order in the shop": ["pickup"],
    "is the shop open on Saturdays": ["hours"],
    "is the shop open on public holidays": ["hours-holiday"],
    "how long is the warranty of machines": ["warranty"],
    "warranty of seals and filters": ["warranty-parts"],
    "what do I send for a warranty claim": ["warranty-claim"],
    "how do I clean the brewing unit": ["clean"],
    "how often do I descale the machine": ["descale", "descale-hard"],
    "descale with hard water": ["descale-hard", "descale"],
    "when do I change the water filter": ["filter"],
    "make the grind finer on the mill": ["grind"],
    "froth milk temperature": ["milk"],
    "what does error E1 mean": ["error-1"],
    "error E2 brewing unit missing": ["error-2"],
    "machine is too hot error": ["error-3"],
    "how long is a voucher valid": ["voucher"],
    "I lost my voucher": ["voucher-lost"],
    "found the machine cheaper elsewhere": ["price"],
    "change the address of my order": ["account"],
    "cancel an order": ["cancel"],
    "when do I get the invoice": ["invoice"],
}

_database = sqlite3.connect(":memory:", check_same_thread=False)
_database.execute("CREATE VIRTUAL TABLE passages USING fts5(id UNINDEXED, text)")
_database.executemany("INSERT INTO passages VALUES (?, ?)", PASSAGES.items())


def search(query: str, limit: int) -> list[tuple[str, float, str]]:
    """Passages that share a word with the query: id, BM25 score (higher is better), text."""
    words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
    if not words:
        return []
    return _database.execute(
        "SELECT id, -bm25(passages), text FROM passages WHERE passages MATCH ? "
        "ORDER BY bm25(passages), id LIMIT ?",
        (words, limit),
    ).fetchall()
