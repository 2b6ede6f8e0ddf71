// SPDX-License-Identifier: BSD-3-Clause
//   torchfuse_programs NAME ARGUMENT...
//   torchfuse_programs --torch-version
#include "programs.h"

#include <c10/util/Exception.h>
#include <torch/version.h>

#include <exception>
#include <iostream>
#include <map>

int main(int argc, char** argv) {
  const std::map<std::string, void (*)(const Arguments&)> programs{
      {"autocast", autocast_program::start},     {"data_parallel", data_parallel_program::start},
      {"optimizers", optimizers_program::start}, {"ranks", ranks_program::start},
      {"scheduler", scheduler_program::start},   {"sharded", sharded_program::start},
      {"train", train_program::start},           {"weights", weights_program::start},
  };
  const std::string name = argc > 1 ? argv[1] : "";
  if (name == "--torch-version") {
    std::cout << TORCH_VERSION << '\n';
    return 0;
  }
  try {
    const auto program = programs.find(name);
    TORCH_CHECK(program != programs.end(), "expected the name of a program, got '", name, "'.");
    program->second(Arguments(argv + 2, argv + argc));
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
  return 1;
}
