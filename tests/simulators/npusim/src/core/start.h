// What the libraries do once the program has initialised the driver.
#pragma once

namespace npusim {

// `starter` runs in every process that initialises the driver, when it does.
void at_start(void (*starter)());
void start();

}  // namespace npusim
