"""The photographs of Debian's package `tuxpaint-stamps-default` that are used, and what is on them.

A line is a thing: its name, the photographs that are trained on, and behind a bar other pictures of it, which are held
out: another photograph, or a drawing. Things behind `NEVER` are never trained on: of them only the kind is asked.
"""

from __future__ import annotations

from posixpath import normpath
from typing import NamedTuple


# By kind of thing: folder, then things.
TABLE = {
    "animal": """
        animals/mammals/
        badger: badger
        bear: bears/bear | bears/european-bear
        bison: bovines/bison
        cow: bovines/cow | bovines/cow_white
        goat: bovines/goat
        ram: bovines/ram
        sheep: bovines/sheep | bovines/sheep_lamb
        yak: bovines/yak
        camel: camel/camel
        lion: cats/lion-2 | cats/lion
        tiger: cats/tiger | cats/tiger_sumatran
        reindeer: deer/caribou
        deer: deer/deer | deer/wapiti
        dog: dogs/dog
        fox: dogs/fox
        elephant: elephant
        donkey: equines/donkey | equines/donkey_eating
        horse: equines/horse
        zebra: equines/zebra
        ferret: ferret
        giraffe: giraffe
        hippo: hippopotamus
        pig: pig pig_golden | pig_golden2
        rabbit: rodents/rabbit rabbit_little | rodents/rabbit-2
        beaver: rodents/beaver
        mouse: rodents/mouse
        squirrel: rodents/squirrel
        chimpanzee: apes/chimp
        gorilla: apes/gorilla
        dolphin: aquatic/dolphin
        whale: aquatic/orca | aquatic/whale
        otter: aquatic/otter
        seal: aquatic/sea_lion
        kangaroo: ../marsupials/kangaroo
        koala: ../marsupials/koala
        frog: ../amphibians/frog | ../amphibians/frog-1
        NEVER
        bull: bovines/bull
        gnu: bovines/gnu-stand
        dingo: dogs/dingo
        rhino: rhino_black
        marmot: rodents/marmot
        rat: rodents/rat
        wombat: ../marsupials/wombat
        zebu: bovines/zebu
    """,
    "bird": """
        animals/birds/
        crow: crow | blackbird
        crane: crowned_crane
        duck: duck | drake
        goose: gander
        guinea fowl: guineafowl | helmeted_guineafowl
        hen: hen
        rooster: rooster
        heron: heron_greatblue | heron_greatblue_flying
        penguin: penguin magellanic_penguin | little-penguin
        magpie: magpie
        ostrich: ostrich
        owl: owl
        peacock: peacock
        pelican: pelican
        pigeon: pigeon
        flamingo: pink_flamingo
        parrot: rainbow-lorikeet | adelaide-rosella
        seagull: silver-gull | seagull
        toucan: tucan
        turkey: turkey
        NEVER
        cuckoo: cuckoo
        lark: lark
        rhea: nandou
        vulture: vulture
    """,
    "fish": """
        animals/fish/
        butterflyfish: butterflyfish
        clownfish: clownfish
        lionfish: lionfish
        trout: coraltrout
        NEVER
        grouper: bluegroper
        wrasse: moonwrasse
        striped fish: stripedfish
    """,
    "insect": """
        animals/insects/
        bee: hoverfly | bee
        fly: fly
        grasshopper: grasshopper
        mantis: mantis
        moth: xanthia
        NEVER
        hornet: hornet
    """,
    "fruit": """
        food/fruit/
        apple: apple_red apple_fuji apple_granny_smith | apple_green apple_sierra_beauty cartoon/apple
        apricot: apricot | Apricot_whole
        avocado: avocado
        banana: banana | cartoon/banana
        bunch of grapes: grapes | cartoon/grapes
        kiwi: kiwi
        lemon: lemon | cartoon/lemon
        lime: sliced_lime
        mango: mango
        orange: mandarine orange | sliced_orange cartoon/orange
        pear: pear | cartoon/pear
        pineapple: pineapple | cartoon/pineapple
        raspberry: raspberry | cartoon/raspberry
        strawberry: strawberry | Strawberry2 cartoon/strawberry
        NEVER
        pomegranate: pomegranate
        cherimoya: cherimoya
        bitter orange: orange_seville
    """,
    "vegetable": """
        food/vegetables/
        broccoli: broccoli
        carrot: carrot
        chili: chilepepper
        corn cob: corn
        eggplant: eggplant
        garlic: garlic | garlics
        lettuce: lettuce | redlettuce
        mushroom: mushroom | ../../plants/mushrooms/cep
        onion: onion
        pepper: pepper | yellowpepper
        potato: potato
        pumpkin: pumpkin_small
        tomato: tomato
        NEVER
        yam: yam
        squash: pattypan_squash
        ginger: ../spices/ginger
    """,
    "nut": """
        food/nuts/
        almond: almond
        walnut: walnut | walnut_shelled
        NEVER
        pecan: pecan
    """,
    "flower": """
        plants/flowers/
        daffodil: daffodil
        hibiscus: flower10 | chemparathi
        iris: iris
        marigold: marigold
        rose: rose
        petunia: whitestar-petunia
        gazania: red-gazania
        daisy: yellow-flower
        NEVER
        anemone: anemone_red
        anthurium: anthoorium
        adenium: adeenia
        buttercup: flower2
        dog rose: flower8
        bluebell: flower1
    """,
    "tree": """
        plants/trees/
        birch: birch
        palm: liberia-palm
        oak: holm_oak
        fir: ../../seasonal/christmas/Christmas_Tree_photo
        NEVER
        pili: tree336
    """,
    "vehicle": """
        vehicles/
        car: auto/beetle auto/sedan | auto/sportscar2
        pickup: auto/truck
        fire truck: emergency/firetruck | emergency/cartoon/fire_engine
        bus: masstransit/green_korean_bus | masstransit/cartoon/double_decker_bus
        race car: race/indycar
        plane: flight/planes/747 | ../military/vehicles/f22_raptor flight/planes/cartoon/plane
        balloon: flight/balloon360
        tricycle: cycle/pink_tricycle
        ship: ship/chineseJunk | ship/walnutBoat
        tank: ../military/vehicles/ww2_german_gun | ../military/vehicles/bradley
        NEVER
        garbage truck: garbagetruck
        dumper: construction/dumper
        armoured car: ../military/vehicles/infantry-stryker
    """,
    "tool": """
        household/tools/
        hammer: hammer
        paintbrush: paintbrush_large
        saw: saw
        spade: spade
        wrench: wrench wrench_plumbers | wrench_adjustable
        toolbox: toolbox
        tape measure: measuring_tape
        NEVER
        mallet: mallet_metal
        cement mixer: cementmixer
    """,
    "instrument": """
        hobbies/music/
        trumpet: brass/trumpet
        cymbal: percussion/cymbal_crash
        drum: percussion/drum_tomtom_floor | percussion/drumkit
        guitar: string/guitar_classical string/guitar2 | string/guitar_electric string/guitar_electric_bass
        violin: string/violin
        NEVER
        cello: string/cello
        bassoon: wind/bassoon
    """,
    "ball": """
        sports/
        basketball: basketball
        football: football | australian_rules_football
        soccer ball: soccer
        tennis ball: tennis_ball
        NEVER
        cricket ball: cricketball
    """,
    "household thing": """
        household/
        light bulb: Lightbulb
        mug: dishes/mug
        teapot: dishes/teapot
        jug: dishes/pitcher_small
        kettle: kettle
        key: key
        rubber duck: rubberduck
        toilet: toilet
        garbage can: garbagecan | wheelie_bin
        NEVER
        pepper mill: dishes/utensils/pepper_grinder
        compost bin: home_compost_bin
    """,
    "planet": """
        space/planets/
        Earth: 3_earth
        Jupiter: 5_jupiter
        Mars: 4_mars
        Saturn: 6_saturn
        NEVER
        Venus: 2_venus
        Neptune: 8_neptune
    """,
}
NEVER = "NEVER"


class Thing(NamedTuple):
    """Something that is asked about.

    Attributes:
        name (`str`): in English.
        kind (`str`): of thing.
        trained, others (`tuple[str, ...]`): its pictures, without their ending, below the folder of the stamps. Of a
            thing that is never trained on, all are `others`.
        known (`bool`): whether its name is trained.
    """

    name: str
    kind: str
    trained: tuple[str, ...]
    others: tuple[str, ...]
    known: bool

    @property
    def named(self) -> str:
        """With its article: "a zebra", "an apple", "the Earth"."""
        if self.kind == "planet":
            return "the Earth" if self.name == "Earth" else self.name
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def the(self) -> str:
        """ "the zebra"."""
        return self.named if self.kind == "planet" else f"the {self.name}"


def of_kind(kind: str) -> str:
    """ "an animal"."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def read_table() -> list[Thing]:
    """All things, in the order of the table."""
    things = []
    for kind, text in TABLE.items():
        folder, *lines = text.split("\n", 1)[1].strip().splitlines()
        known = True
        for line in map(str.strip, lines):
            if line == NEVER:
                known = False
                continue
            name, _, files = line.partition(": ")
            trained, _, others = files.partition(" | ")
            own, held_out = (_paths(folder.strip(), part) for part in (trained, others))
            things.append(Thing(name, kind, own if known else (), held_out if known else own, known))
    return things


def _paths(folder: str, files: str) -> tuple[str, ...]:
    return tuple(normpath(f"{folder}{file}") for file in files.split())
