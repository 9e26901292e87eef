"""The words that stand in the pictures of documents and charts, and in questions without a picture."""

NAMES = (
    "Adam Alice Anna Ben Bruno Carla Clara David Diego Elena Emma Felix Fiona Grace Hana Hugo Igor Irene Ivan Jakob "
    "Julia Karim Laura Leo Linda Marco Maria Nadia Nina Omar Oscar Paula Peter Rosa Ruben Sara Simon Tara Victor Wanda"
).split()
CITIES = (
    "Accra Athens Berlin Bogota Boston Cairo Dakar Delhi Dublin Geneva Hanoi Havana Kyoto Lagos Lima Lisbon London "
    "Lyon Madrid Manila Miami Milan Moscow Munich Nairobi Naples Osaka Oslo Paris Porto Prague Quito Riga Rome Seoul "
    "Sydney Tokyo Toronto Vienna Warsaw"
).split()
JOBS = (
    "actor artist baker banker barber builder butcher carver clerk cook dancer dentist doctor driver editor farmer "
    "fisher guard judge lawyer miner model nurse painter pilot plumber poet porter sailor singer soldier tailor "
    "teacher tutor waiter weaver writer"
).split()
ITEMS = (
    "apron basket belt blanket bottle bucket candle carpet chair clock comb curtain dress drum fork guitar hammer hat "
    "kettle knife ladder lamp mirror needle oven pencil piano pillow radio rope shirt sofa spoon table tent towel "
    "vase violin wallet watch"
).split()
NOUNS = (
    "acorn angel arrow badge bamboo banana beach bird bridge bronze cabin camel canal castle cave cherry cloud coast "
    "copper coral cotton cradle crown desert donkey dragon eagle earth engine falcon feather field flame flower forest "
    "frost garden ginger glass goat grape hill honey horse hotel island ivory jacket jungle kite lake lemon lion "
    "magnet maple meadow melon metal monkey moon museum music nest ocean onion orange owl palace pepper petal pigeon "
    "planet pond potato prince quilt rabbit rain river robin rocket rose saddle salmon sand school shadow sheep silver "
    "snow spider spring star stone summer sun temple thunder tiger tomato tower train turtle valley velvet village "
    "water whale wheat wind window winter wolf yard zebra"
).split()
LABELS = (
    "Tea Milk Nuts Rice Corn Eggs Figs Jam Oats Salt Fish Soup Lime Kale Beet Pie Ham Rye Bun Chai Dill Leek Wine Yam"
).split()

CAPITALS = {
    "Austria": "Vienna",
    "Canada": "Ottawa",
    "China": "Beijing",
    "Cuba": "Havana",
    "Egypt": "Cairo",
    "England": "London",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Russia": "Moscow",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Thailand": "Bangkok",
}
OPPOSITES = {
    "big": "small",
    "black": "white",
    "clean": "dirty",
    "cold": "hot",
    "day": "night",
    "early": "late",
    "empty": "full",
    "fast": "slow",
    "happy": "sad",
    "high": "low",
    "inside": "outside",
    "long": "short",
    "new": "old",
    "open": "closed",
    "poor": "rich",
    "strong": "weak",
    "true": "false",
    "up": "down",
    "wet": "dry",
    "young": "old",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
