# SPDX-License-Identifier: 0BSD
#
# zcrecord_embed(TARGET ARCHIVE [OPTION...]) puts an archive's tensors into a target's read-only memory; its sources
# include "STEM.h". STEM is the archive's name in lower case, with an underscore for each run of other characters than
# letters and digits. Options are those of `zcrecord embed`, such as --select or --section. The project has to have the
# languages C and ASM.

find_program(ZCRECORD zcrecord)
if(NOT ZCRECORD AND NOT ZCRECORD_COMMAND)
  message(FATAL_ERROR "zcrecord is not on PATH: pip install it from its checkout, or set ZCRECORD_COMMAND to what runs it")
endif()
set(ZCRECORD_COMMAND "${ZCRECORD}" CACHE STRING "what runs zcrecord, such as python3;-m;zcrecord")

function(zcrecord_embed target archive)
  get_filename_component(archive "${archive}" ABSOLUTE)
  get_filename_component(stem "${archive}" NAME_WLE)
  string(TOLOWER "${stem}" stem)
  string(REGEX REPLACE "[^a-z0-9]+" "_" stem "${stem}")
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/${target}_weights")
  set(made "${folder}/${stem}.S" "${folder}/${stem}.h")
  add_custom_command(
    OUTPUT ${made}
    COMMAND ${ZCRECORD_COMMAND} embed "${archive}" --lang c --name "${stem}" --output "${folder}" --quiet ${ARGN}
    DEPENDS "${archive}"
    VERBATIM)
  # The assembler takes the bytes from the archive, and no dependency file says so: it is named here.
  set_source_files_properties("${folder}/${stem}.S" PROPERTIES OBJECT_DEPENDS "${archive}")
  target_sources(${target} PRIVATE ${made})
  target_include_directories(${target} PRIVATE "${folder}")
endfunction()
