"""Word lists of the generated tasks: names of many languages, places, trades, goods, events.

Their own file, so that no other package's data decides what a problem says. Changing a list changes the
problems: raise `structured.VERSION` with it.
"""


def _lines(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.replace("\n", ",").split(",") if entry.strip())


FIRST_NAMES = _lines("""
Aiko, Alejandra, Amara, Amina, Anders, Anneke, Antonio, Arjun, Astrid, Ayşe, Beatriz, Björn, Bogdan, Brigid,
Carmen, Chidi, Chloe, Claire, Daniel, Deepa, Dmitri, Ebba, Edward, Elena, Emeka, Emily, Enzo, Esther, Fatima,
Felix, Femi, Finn, Fiona, Giulia, Grace, Greta, Hannah, Haruto, Hassan, Helga, Henrik, Hiroshi, Ibrahim, Ilse,
Indira, Ines, Ingrid, Isabel, Ivan, Jamal, Jana, Javier, Jonas, José, Julia, Kaito, Karim, Katya, Keiko, Kwame,
Lara, Lars, Leila, Liam, Linh, Lucia, Luis, Łukasz, Mai, Malik, Marek, Maria, Mateo, Mei, Mehmet, Miguel, Milan,
Mira, Mohammed, Nadia, Naomi, Nia, Nikos, Nora, Olga, Oliver, Omar, Paolo, Pavel, Pedro, Petra, Pierre, Priya,
Rafael, Rashid, Ravi, Renata, Rosa, Ruth, Sakura, Samir, Sandra, Sanjay, Sara, Sean, Sofia, Søren, Stefan, Sunita,
Svetlana, Tariq, Tamar, Thandi, Theo, Thomas, Tomás, Ulrika, Valeria, Vera, Victor, Vikram, Wanjiru, Wei, Yasmin,
Yusuf, Zainab, Zoë, Zuzana
""")

LAST_NAMES = _lines("""
Abadi, Adeyemi, Ahmed, Almeida, Andersson, Bakker, Banerjee, Barros, Becker, Bergman, Bianchi, Brown, Carter,
Castillo, Chen, Cohen, Costa, Cruz, Dahl, Demir, Diallo, Diaz, Dubois, Eriksen, Estrada, Evans, Farah, Fernandes,
Ferrari, Fischer, Fuentes, Garcia, Ghosh, Gomez, Gupta, Haddad, Hansen, Hayashi, Herrera, Hoang, Horvat, Hughes,
Ito, Ivanov, Iyer, Jansen, Jensen, Johnson, Kamau, Kapoor, Kaya, Keller, Khan, Kim, Kowalski, Kumar, Larsen,
Laurent, Lee, Lewis, Lindqvist, Lopez, Mahlangu, Marino, Martin, Mazur, Mensah, Meyer, Mori, Moreau, Müller,
Mwangi, Nakamura, Navarro, Nguyen, Novak, Nowak, Obi, Okafor, Oliveira, Olsen, Ortega, Park, Patel, Pereira,
Petrov, Popescu, Quinn, Rahman, Ramos, Reyes, Ricci, Rojas, Rossi, Russo, Saito, Santos, Sato, Schmidt, Shah,
Silva, Singh, Smith, Sousa, Suzuki, Takahashi, Tanaka, Taylor, Torres, Tran, Usman, Vargas, Varga, Vasquez, Visser,
Walker, Wang, Weber, Wilson, Wong, Yamada, Yıldız, Young, Zhang, Ziegler
""")

CITIES = _lines("""
Accra, Adelaide, Ankara, Antwerp, Athens, Auckland, Baku, Bangkok, Barcelona, Basel, Beirut, Bergen, Berlin,
Bogotá, Bologna, Boston, Brno, Brussels, Bucharest, Budapest, Cairo, Calgary, Cape Town, Cardiff, Casablanca,
Chicago, Cologne, Copenhagen, Cork, Dakar, Dallas, Delhi, Denver, Detroit, Dhaka, Dresden, Dublin, Durban,
Edinburgh, Florence, Gdansk, Geneva, Ghent, Glasgow, Graz, Hamburg, Hanoi, Havana, Helsinki, Istanbul, Jakarta,
Kampala, Karachi, Kigali, Kobe, Krakow, Kyoto, Lagos, Leeds, Leipzig, Lima, Lisbon, Liverpool, London, Lyon,
Madrid, Malmö, Manchester, Manila, Marseille, Melbourne, Mexico City, Miami, Milan, Montreal, Mumbai, Munich,
Nairobi, Nantes, Naples, New York, Nice, Osaka, Oslo, Ottawa, Oxford, Paris, Perth, Porto, Prague, Quito, Riga,
Rome, Rotterdam, Salzburg, San Diego, Santiago, Sapporo, Seattle, Seoul, Seville, Shanghai, Singapore, Sofia,
Split, Stockholm, Sydney, Taipei, Tallinn, Tampere, Tbilisi, Tokyo, Toronto, Toulouse, Tunis, Turin, Uppsala,
Utrecht, Valencia, Vancouver, Venice, Vienna, Vilnius, Warsaw, Wellington, York, Zagreb, Zurich
""")

JOBS = _lines("""
accountant, actor, architect, baker, banker, barber, biologist, bookseller, bus driver, butcher, carpenter,
chemist, coach, cook, dancer, dentist, designer, doctor, economist, editor, electrician, engineer, farmer,
firefighter, florist, gardener, geologist, goldsmith, guide, historian, interpreter, journalist, judge, lawyer,
lecturer, librarian, locksmith, mechanic, midwife, miner, musician, nurse, optician, painter, pharmacist,
photographer, pilot, plumber, postman, potter, printer, programmer, roofer, sailor, sculptor, singer, surgeon,
tailor, teacher, translator, vet, violinist, waiter, weaver, welder, writer
""")

PRODUCTS = _lines("""
apron, backpack, ball pen, basket, bath towel, bicycle pump, blanket, blender, book shelf, bread knife, broom,
bucket, camera bag, candle, card holder, chair, chess set, coat hook, coffee mug, compass, cooking pot, cushion,
desk lamp, dinner plate, door mat, drill, dust pan, electric kettle, envelope, extension cord, fan, filing box,
flashlight, flower pot, folding table, fountain pen, frying pan, garden hose, glass jar, glue stick, hammer,
hand mixer, headset, ice tray, ink bottle, iron, keyboard, kitchen scale, ladder, lantern, leather belt,
lunch box, mirror, mouse pad, notebook, oven glove, paint brush, paper roll, pencil case, phone stand,
picture frame, pillow, plant stand, radio, rain coat, rope, ruler, salad bowl, saw, scarf, screwdriver, shovel,
sleeping bag, soap dish, spoon, stapler, stool, suitcase, sun hat, table cloth, tape measure, tea pot, tent,
thermos, toaster, tool box, toothbrush, tray, tripod, umbrella, vase, wall clock, water bottle, whistle,
winter glove, wool sock, wrench, yoga mat
""")

EVENTS = _lines("""
annual dinner, art fair, autumn market, bake sale, blood drive, board meeting, book club, budget review,
career day, charity run, chess tournament, choir concert, city tour, class reunion, coding workshop, craft fair,
dance evening, design review, farewell party, film night, fire drill, first aid course, flea market, flower show,
food festival, garden party, guest lecture, harvest feast, hiking trip, job interview, kick-off meeting,
language course, open house, opening night, parents evening, photo contest, piano recital, planning session,
poetry reading, press briefing, product launch, project demo, quiz night, safety training, sales meeting,
science fair, spring clean, staff lunch, street party, summer camp, swimming gala, tax seminar, team retreat,
tree planting, wine tasting, winter ball, yoga class
""")

PLACES = _lines(
    """
the old mill, the town hall, the main library, the harbour office, the north gate, the museum cafe, the sports
hall, the blue room, the school yard, the city park, the music school, the roof terrace, the art gallery, the
train station, the fire station, the community centre, the botanic garden, the river pier, the castle court,
the market square, Room 4, Room 12, Room 27, Hall A, Hall C, Studio 3, Studio 9, Block 7
""".replace("\n", " ")
)

MONTHS = _lines("January, February, March, April, May, June, July, August, September, October, November, December")

COMPANIES = _lines("""
Alba Tools, Aster Labs, Birch Media, Blue Kite, Boreal Foods, Cedar Works, Corvo Print, Delta Glass, Dune Travel,
Elm Systems, Falco Bikes, Fern Dental, Halo Energy, Indigo Maps, Juno Textiles, Kestrel Air, Lumen Optics,
Mistral Sails, Nimbus Data, North Quay, Onyx Stone, Opal Books, Pine Street Bakery, Quartz Audio, Raven Films,
Sable Motors, Solis Farm, Tern Shipping, Umbra Paints, Vela Design, Willow Care, Zephyr Pumps
""")

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
