//! `cobweb io`, `info`, `map`, `check`, `measure`, `compare`, `create` side by side with qemu-io and qemu-img: the same words, on the same files, give the
//! same output, errors and exit codes. Only times and rates are not compared, and the program's name.
//!
//! The steps are in the `.txt` files next to this one; [`script`] says how they are written. A tool that is not installed makes its tests pass
//! with a line on stderr, or fail if `CI` is set in the environment.
#![cfg(feature = "cli")]

mod damage;
mod in_use;
mod script;

use script::run;

#[test]
fn io_on_raw_images_says_and_does_what_qemu_io_does() {
    run("raw_io", include_str!("raw_io.txt"), 45);
}

#[test]
fn io_from_standard_input_and_open_commands_behave_like_those_of_qemu_io() {
    run("raw_open", include_str!("raw_open.txt"), 40);
}

#[test]
fn compare_map_and_info_of_raw_images_tell_what_qemu_img_tells() {
    run("raw_img", include_str!("raw_img.txt"), 80);
}

#[test]
fn info_check_map_and_compare_of_qcow2_images_tell_what_qemu_img_tells() {
    run("qcow2_img", include_str!("qcow2_img.txt"), 140);
}

#[test]
fn info_and_check_tell_of_every_geometry_what_qemu_img_tells() {
    run("qcow2_look", include_str!("qcow2_look.txt"), 180);
}

#[test]
fn create_makes_what_qemu_img_makes_and_refuses_what_it_refuses() {
    run("create", include_str!("create.txt"), 380);
}

#[test]
fn measure_of_sizes_and_images_gives_the_figures_of_qemu_img() {
    run("measure", include_str!("measure.txt"), 250);
}

#[test]
fn chains_are_mapped_listed_and_compared_like_qemu_img_does() {
    run("chains", include_str!("chains.txt"), 597);
}

#[test]
fn writes_to_qcow2_images_leave_what_those_of_qemu_io_leave() {
    run("qcow2_io", include_str!("qcow2_io.txt"), 350);
}

#[test]
fn opening_of_odd_and_damaged_qcow2_images_ends_as_with_qemu_io() {
    run("qcow2_open", include_str!("qcow2_open.txt"), 296);
}
